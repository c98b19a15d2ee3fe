"""Agents in the sandbox, in the worker and behind a gateway: the run resumes after the kill of each process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from transformers import AutoTokenizer

from prime_rl.orchestrator.ledger.ledger import read_ledger
from prime_rl.storage.batch import read_batch
from prime_rl.storage.paths import RunPaths
from tests.integration.rl.conftest import MODEL, ORCHESTRATOR, StartCommand, own_server, rl_values
from tests.integration.rl.test_restarts import assert_exactly_once, events, kill, wait_for_progress, worker
from tests.integration.rl.test_whole_run import manifest
from tests.support import talking_agent
from tests.support.command import END_TIMEOUT_SECONDS, executable, json_lines, metrics_of, until
from tests.support.isolation import needs_isolation
from tests.support.server import free_port

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(1200), needs_isolation]

STEPS, STALENESS = 20, 2
AGENT = Path(talking_agent.__file__)
TESTS = """cd /tests
python3 -c 'import json, agent; print(agent.grade(json.load(open("/app/replies.json"))))' > /logs/verifier/reward.txt
"""


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A gateway and two agents that use it; shells start them again. Yield its address and its shell."""
    url = f"http://127.0.0.1:{free_port()}"
    agent = [sys.executable, str(AGENT), "serve", url]
    commands = [[executable("gateway"), "--port", url.rpartition(":")[2]], agent, agent]
    loop = ["sh", "-c", 'while :; do "$@"; done', "sh"]
    shells = [subprocess.Popen([*loop, *each], stderr=subprocess.DEVNULL, start_new_session=True) for each in commands]
    try:
        until(lambda: count(url) is not None, "the gateway")
        yield url, psutil.Process(shells[0].pid)
    finally:
        for shell in shells:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()


def count(url: str) -> dict[str, int] | None:
    """How many rollouts of the gateway wait and are taken; None if it does not answer."""
    try:
        return httpx.get(f"{url}/rollouts").json()
    except httpx.TransportError:
        return None


def environments(folder: Path, url: str) -> list[dict[str, Any]]:
    """A program, a gateway and a function, with questions of one word."""
    for word in ("apple", "stone", "river", "cloud"):
        (folder / "tasks" / word / "tests").mkdir(parents=True)
        files = {"task.toml": "", "instruction.md": word, "tests/test.sh": TESTS, "tests/agent.py": AGENT.read_text()}
        for name, text in files.items():
            (folder / "tasks" / word / name).write_text(text)
    (folder / "rows.csv").write_text("question,answer\ntable,\nchair,\ngreen,\n")
    rows = {"id": "dataset", "args": {"data_path": str(folder / "rows.csv"), "grader": "none"}}
    program = ["python3", "-c", AGENT.read_text(), "{prompt}"]
    return [
        {"id": "task_folder", "name": "program", "args": {"path": str(folder / "tasks")}, "command": program},
        {**rows, "name": "gateway", "gateway": url, "max_concurrent": 8},
        {**rows, "name": "function", "agent": f"{AGENT}:solve"},
    ]


def test_agents_are_trained_once_although_every_process_is_killed(
    start: StartCommand, tmp_path: Path, gateway: tuple[str, psutil.Process]
) -> None:
    url, shell = gateway
    settings = {"max_steps": STEPS, "async_level": STALENESS, "max_restarts": 2, "seq_len": 256}
    values = rl_values(tmp_path / "run", inference=own_server(), orchestrator={**ORCHESTRATOR}, **settings)
    values |= {"ckpt": {"interval": 4}, "trainer": {"keep_batches": True}}
    values["orchestrator"] |= {"env": environments(tmp_path, url), "sampling": {"max_tokens": 32}}
    run = start("rl", values, tmp_path / "run")
    run.until_step("trainer", 0)

    def kill_gateway() -> None:
        run.until(lambda: (count(url) or {"taken": 0})["taken"] > 0, "a rollout of an agent")
        shell.children()[0].kill()

    kill_gateway()
    wait_for_progress(run)
    shell.suspend()  # workers that start meanwhile wait for the gateway
    kill_gateway()
    for process in worker(run).parent().children():
        process.kill()
    run.until(lambda: "rollouts wait for it" in run.paths.log("orchestrator").read_text(), "a worker that waits")
    shell.resume()
    wait_for_progress(run)
    kill(run, run.role("inference"), "inference")
    wait_for_progress(run)
    kill(run, run.role("orchestrator"), "the orchestrator")
    wait_for_progress(run)
    run.process.kill()
    until(lambda: not run.started(), "the end of all processes", END_TIMEOUT_SECONDS)
    assert [event["name"] for event in events(run.paths, "restarted")] == ["inference", "orchestrator"]

    run = start("rl", values | {"ckpt": {"interval": 4, "resume_step": -1}}, tmp_path / "run")
    assert run.end() == 0, run.story()
    assert_exactly_once(run.paths, STEPS)
    assert_nothing_is_lost(run.paths)
    assert_batches_are_what_was_sampled(run.paths)
    for line in metrics_of(run.paths, "orchestrator"):
        assert (line["samples/per_branch"], line["samples/tokens_trained_twice"]) == (1.0, 0.0), line["step"]


def assert_nothing_is_lost(paths: RunPaths) -> None:
    """Each position of the stream is trained, waits undispatched, or was dropped because its rewards are equal."""
    ledger = read_ledger(paths, manifest(paths, STEPS - 1)["branch"])
    assert ledger is not None and not ledger.positions.unfinished
    trained = {group for step in range(STEPS) for group in manifest(paths, step)["group_ids"]}
    records = [record for file in paths.root.rglob("ledger/branch_*.jsonl") for record in json_lines(file)]
    dropped = {record["group_id"]: record["reason"] for record in records if record["record"] == "dropped"}
    assert {*dropped.values()} <= {"zero_advantage"}
    waiting = {draw.group_id for draw in ledger.positions.waiting}
    assert trained | waiting | dropped.keys() == set(range(ledger.positions.cursor)) and not trained & waiting
    assert [warning for warning in json_lines(paths.warnings) if warning["kind"] == "group"] == []


def assert_batches_are_what_was_sampled(paths: RunPaths) -> None:
    """The tokens of each rollout are one sample, the text that was graded, and of versions in the bound."""
    tokenizer, seen, num_replies = AutoTokenizer.from_pretrained(MODEL), set[str](), 0
    for step in range(STEPS):
        batch, _ = read_batch(paths.rollouts(step), step)
        assert batch.versions[batch.loss_mask != 0].min() >= step - STALENESS
        rows = {(row["group_id"], row["rollout"]): row for row in json_lines(paths.samples(step))}
        keys = list(zip(batch.sample_group.tolist(), batch.sample_rollout.tolist(), strict=True))
        assert sorted(keys) == sorted(rows)
        ends = np.cumsum(batch.seq_lens)[:-1]
        for key, tokens, mask in zip(keys, np.split(batch.tokens, ends), np.split(batch.loss_mask, ends), strict=True):
            replies = [said["content"] for said in rows[key]["messages"] if said["role"] == "assistant"]
            assert tokenizer.decode(tokens[mask != 0], skip_special_tokens=True) == "".join(replies)
            assert rows[key]["reward"] == pytest.approx(talking_agent.grade(replies))
            seen.add(rows[key]["env"])
            num_replies += len(replies)
    assert seen == {"program", "gateway", "function"} and num_replies > 2 * 16 * STEPS, "of several turns"
