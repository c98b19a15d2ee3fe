"""Processes whose settings do not fit each other end with one line and exit code 2; the server stays usable."""

import signal
from pathlib import Path

import pytest

from tests.integration.rl.conftest import MODEL, ORCHESTRATOR, StartCommand, of_server, rl_values
from tests.support.server import Server

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]


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
    assert f"enable_lora = true, and it is false at http://localhost:{server.url.rsplit(':', 1)[1]}; " in message
    trainer.process.send_signal(signal.SIGTERM)
    trainer.end()
    assert str(tmp_path) not in (server.policy()["run_id"] or "")


def test_samples_longer_than_the_servers_context_end_rl(server: Server, start: StartCommand, tmp_path: Path) -> None:
    values = rl_values(tmp_path / "run", orchestrator={**ORCHESTRATOR, "client": of_server(server)})
    run = start("rl", values | {"seq_len": 2049}, tmp_path / "run")
    assert run.end() == 2, run.story()
    assert "seq_len = 2049 here is above model.max_model_len = 2048 at http" in run.errors.splitlines()[-1], run.errors
    assert str(tmp_path) not in (server.policy()["run_id"] or "")
