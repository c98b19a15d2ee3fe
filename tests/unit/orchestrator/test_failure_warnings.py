"""A warning for the 1st, 10th, 100th ... failed group of an environment is written for `rl`."""

import json

import pytest
from loguru import logger

from prime_rl.orchestrator.health.failure_warnings import FailureWarnings

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_failure_warnings_powers_of_ten_per_environment_are_written(tmp_path):
    path = tmp_path / "metrics" / "warnings.jsonl"
    warnings = FailureWarnings(path)
    for number in range(150):
        warnings.add("one", f"group {number}", "NameError: x", "the run ends soon")
    warnings.add("two", "group 7", "KeyError: y", "the run ends soon")
    await warnings.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["env"], line["num_failed"]) for line in lines] == [("one", 1), ("one", 10), ("one", 100), ("two", 1)]
    assert lines[0]["text"] == "environment one: group 0 failed: NameError: x; the run ends soon"
    assert "100 groups failed so far, the last is group 99: NameError: x" in lines[2]["text"]


async def test_failure_warnings_unwritable_file_is_logged(tmp_path):
    (tmp_path / "metrics").write_text("a file")
    said = []
    handler = logger.add(lambda message: said.append(message.record["message"]), level="WARNING")
    warnings = FailureWarnings(tmp_path / "metrics" / "warnings.jsonl")
    warnings.add("one", "group 0", "NameError: x", "the run ends soon")
    await warnings.close()
    logger.remove(handler)
    assert len(said) == 1 and "cannot be written" in said[0]


async def test_failure_warnings_no_failures_write_no_file(tmp_path):
    await FailureWarnings(tmp_path / "warnings.jsonl").close()
    assert list(tmp_path.iterdir()) == []
