"""I7 without `rl`: whoever waits for a process that does nothing any more says so, and ends in time."""

import os
import signal
from pathlib import Path

import pytest

from prime_rl.run.heartbeat import read_beat
from prime_rl.run.paths import RunPaths
from tests.integration.rl.conftest import MODEL, ORCHESTRATOR, StartCommand, of_server
from tests.support.server import Server

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

LIMITS = {"silence": 2, "timeout": 8}


def test_each_notices_the_others_silence(server: Server, start: StartCommand, tmp_path: Path) -> None:
    """A trainer that is stopped ends the orchestrator, and that ends the trainer, once it goes on."""
    paths = RunPaths(tmp_path / "run")
    shared = {"output_dir": str(paths.root), "model": {"name": str(MODEL)}, "heartbeat": LIMITS}
    trainer = start("trainer", shared, paths.root)
    sampling = {**ORCHESTRATOR, "seq_len": 64, "client": of_server(server), "max_concurrent": 64}
    orchestrator = start("orchestrator", shared | sampling, paths.root)
    trainer.until_step("trainer", 1)

    os.kill(trainer.process.pid, signal.SIGSTOP)
    assert orchestrator.end() == 1
    said = orchestrator.errors.splitlines()
    who = f"trainer_0 (pid {trainer.process.pid} on "
    assert any("WARNING" in line and who in line for line in said), "it was reported before the wait was given up"
    assert said[-1].startswith(f"error: {who}"), said[-1]
    assert "is stopped (SIGSTOP?)" in said[-1] and f"log {tmp_path / 'run-trainer.err'}" in said[-1]

    os.kill(trainer.process.pid, signal.SIGCONT)
    assert trainer.end() == 1
    last = trainer.errors.splitlines()[-1]
    assert last.startswith(f"error: orchestrator (pid {orchestrator.process.pid} on ") and "has failed" in last
    beat = read_beat(paths.heartbeat("trainer_0"))
    assert beat is not None and beat.phase == "failed"
