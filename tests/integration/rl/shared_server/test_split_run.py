"""A run that is continued by a second command."""

from pathlib import Path

import pytest

from prime_rl.storage.checkpoint_artifacts import read_resume
from prime_rl.storage.paths import RunPaths
from tests.integration.rl.conftest import ORCHESTRATOR, StartCommand, of_server, rl_values
from tests.integration.rl.test_whole_run import manifest
from tests.support.command import metrics_of
from tests.support.server import Server

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

HALF, STEPS = 2, 4


def test_resumed_run_continues_where_the_first_ended(server: Server, start: StartCommand, tmp_path: Path) -> None:
    """At k = 0, as branch 1; tests/unit/orchestrator compares the batches with those of one run."""
    values = {"orchestrator": {**ORCHESTRATOR, "client": of_server(server)}, "async_level": 0}
    split = RunPaths(tmp_path / "run")
    for steps, ckpt in ((HALF, {"interval": 50}), (STEPS, {"resume_step": HALF})):
        run = start("rl", rl_values(split.root, max_steps=steps, ckpt=ckpt, **values), split.root)
        assert run.end() == 0, run.story()
        assert server.policy()["step"] == steps
        server.reload()
    groups = [group for step in range(STEPS) for group in manifest(split, step)["group_ids"]]
    assert groups == list(range(STEPS * 4)), "at k = 0 batches are shipped in the order of the stream"
    assert [manifest(split, step)["branch"] for step in range(STEPS)] == [0] * HALF + [1] * (STEPS - HALF)
    resume = read_resume(split.checkpoints_dir)
    assert resume is not None and (resume.step, resume.branch) == (HALF, 1)
    for role in ("trainer", "orchestrator"):
        assert [line["step"] for line in metrics_of(split, role)] == list(range(STEPS))
    for line in metrics_of(split, "trainer"):
        assert line["mismatch_kl/on_policy"] < 1e-4, "inference samples from what the trainer resumed"
