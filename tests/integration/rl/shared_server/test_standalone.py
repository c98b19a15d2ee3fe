"""Standalone commands without `rl`: a process that waits for a stopped one reports it and exits in time (I7)."""

import os
import signal
from pathlib import Path

import pytest

from prime_rl.liveness.heartbeat_monitor import read_heartbeat
from prime_rl.storage.paths import RunPaths
from tests.integration.rl.conftest import MODEL, ORCHESTRATOR, StartCommand, of_server
from tests.support.server import Server

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

LIMITS = {"silence": 2, "timeout": 20}  # no process is silent for so long at its start, or on a loaded machine


def test_stopped_trainer_ends_the_orchestrator_and_then_itself(
    server: Server, start: StartCommand, tmp_path: Path
) -> None:
    """The orchestrator exits because of the stopped trainer; the trainer exits after it continues."""
    paths = RunPaths(tmp_path / "run")
    shared = {"output_dir": str(paths.root), "model": {"name": str(MODEL)}, "heartbeat": LIMITS}
    trainer = start("trainer", shared, paths.root)
    sampling = {**ORCHESTRATOR, "seq_len": 64, "client": of_server(server), "max_concurrent": 64}
    orchestrator = start("orchestrator", shared | sampling, paths.root)
    trainer.until_step("trainer", 1)

    os.kill(trainer.process.pid, signal.SIGSTOP)
    assert orchestrator.end() == 1
    message = orchestrator.errors.splitlines()
    who = f"trainer_0 (pid {trainer.process.pid} on "
    assert any("WARNING" in line and who in line for line in message), "it is reported before the time-out"
    assert message[-1].startswith(f"error: {who}"), message[-1]
    assert "is stopped (SIGSTOP?)" in message[-1] and f"log {tmp_path / 'run/logs/trainer.log'}" in message[-1]

    os.kill(trainer.process.pid, signal.SIGCONT)
    assert trainer.end() == 1
    last = trainer.errors.splitlines()[-1]
    assert last.startswith(f"error: orchestrator (pid {orchestrator.process.pid} on ") and "has failed" in last
    beat = read_heartbeat(paths.heartbeat("trainer_0"))
    assert beat is not None and beat.phase == "failed"
