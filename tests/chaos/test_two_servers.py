"""One of two inference servers is killed during a run and restarted: the run continues and keeps the bound (I1)."""

import json
import os
import signal
from pathlib import Path

import pytest

from prime_rl.storage.batch import FORMAT
from tests.integration.rl.conftest import MODEL, StartCommand, rl_values, start
from tests.support.command import metrics_of
from tests.support.server import inference_server

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start"]  # a fixture

STEPS = 48
ASYNC_LEVEL = 2


def test_rl_killed_server_is_restarted_and_rejoins(start: StartCommand, tmp_path: Path) -> None:
    """SIGKILL of server and engine; the restarted server on the same port is found without notice."""
    arguments = ["--model.max-model-len", "64"]
    with inference_server(MODEL, tmp_path / "one.log", arguments) as one:
        with inference_server(MODEL, tmp_path / "two.log", arguments) as two:
            values = rl_values(
                tmp_path / "run",
                max_steps=STEPS,
                async_level=ASYNC_LEVEL,
                heartbeat={"warn_after_seconds": 300, "dead_after_seconds": 600},  # for the suspended rank below
                orchestrator={
                    "batch_size": 16,
                    "rollouts_per_example": 4,
                    "sampling": {"max_tokens": 8},
                    "env": [{"id": "reverse_text", "args": {"words": 200}}],
                    "client": {"base_url": [one.url, two.url]},
                },
            )
            run = start("rl", values, tmp_path / "run")
            run.until_step("orchestrator", 4)
            for pid in [*two.engine_pids(), two.process.pid]:
                os.kill(pid, signal.SIGKILL)
            two.process.wait()
        removed = "inference/servers_removed"
        run.until(lambda: metrics_of(run.paths, "orchestrator")[-1][removed] >= 1, "the server is removed")
        noticed = len(metrics_of(run.paths, "orchestrator"))
        run.until_step("orchestrator", noticed + 2)
        [rank] = run.ranks()
        rank.suspend()  # a server starts slower than this run ends
        with inference_server(MODEL, tmp_path / "again.log", arguments, port=int(two.url.rsplit(":", 1)[1])) as again:
            run.until(lambda: again.policy()["step"] == one.policy()["step"], "the server loads the version")
            assert again.policy()["step"] > 0
            rank.resume()
            assert run.process.wait(600) == 0, run.story()
            assert again.policy()["step"] == one.policy()["step"] == STEPS, "both servers have the last version"
    lines = metrics_of(run.paths, "orchestrator")
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert max(line["staleness/max"] for line in lines) <= ASYNC_LEVEL
    assert all(line["tokens/unaccounted"] == 0 for line in lines)
    shipped = [group for step in range(STEPS) for group in manifest_of(run.paths.rollouts(step))["group_ids"]]
    assert sorted(shipped) == list(range(STEPS * 4)), "every stream position once"


def manifest_of(path: Path) -> dict[str, list[int]]:
    """The manifest of a batch whose rows the trainer has deleted."""
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == FORMAT
    return manifest
