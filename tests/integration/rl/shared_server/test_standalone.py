"""Processes that do not fit, or of which one is stopped: each ends in time with one line, and the server stays (I7)."""

import os
import signal
from pathlib import Path

import pytest

from prime_rl.liveness.heartbeat_monitor import read_heartbeat
from prime_rl.storage.paths import RunPaths
from tests.integration.rl.conftest import MODEL, ORCHESTRATOR, StartCommand, of_server, rl_values
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


def test_trainer_of_adapters_and_a_server_without_them_end_the_run(
    server: Server, start: StartCommand, tmp_path: Path
) -> None:
    """They meet at the orchestrator: by the trainer's heartbeat, and by HTTP."""
    shared = {"output_dir": str(tmp_path / "run"), "model": {"name": str(MODEL)}}
    lora = {"rank": 4, "publish": "adapter"}
    trainer = start("trainer", shared | {"model": {"name": str(MODEL), "lora": lora}}, tmp_path / "run")
    sampling = {**ORCHESTRATOR, "seq_len": 64, "client": of_server(server)}
    orchestrator = start("orchestrator", shared | sampling, tmp_path / "run")
    assert orchestrator.end() == 2
    message = orchestrator.errors.splitlines()[-1]
    place = f"at trainer_0 (pid {trainer.process.pid} on "
    assert message.startswith(f"error: model.lora.publish = adapter {place}"), message
    assert f"enable_lora = true, and it is false at http://127.0.0.1:{server.url.rsplit(':', 1)[1]}; " in message
    trainer.process.send_signal(signal.SIGTERM)
    trainer.end()
    assert str(tmp_path) not in (server.policy()["run_id"] or "")


def test_samples_longer_than_the_servers_context_end_rl(server: Server, start: StartCommand, tmp_path: Path) -> None:
    values = rl_values(tmp_path / "run", orchestrator={**ORCHESTRATOR, "client": of_server(server)})
    run = start("rl", values | {"seq_len": 2049}, tmp_path / "run")
    assert run.end() == 2, run.story()
    assert "seq_len = 2049 here is above model.max_model_len = 2048 at http" in run.errors.splitlines()[-1], run.errors
    assert str(tmp_path) not in (server.policy()["run_id"] or "")
