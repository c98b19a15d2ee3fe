"""`rl` on several nodes: addresses of this machine, on which `ssh` runs its command, and a server without a model."""

import json
import os
import signal
from pathlib import Path

import pytest

from prime_rl.liveness.heartbeat_monitor import read_heartbeats
from prime_rl.storage.checkpoint_artifacts import find_checkpoints
from tests.chaos.session import HERE as CHAOS
from tests.integration.rl.conftest import StartCommand, own_server, rl_values
from tests.support.server import free_port
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, KEY = 10, "a key"


@pytest.fixture
def on_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The configuration of a run with a server on one node, and a rank of the trainer on each of two others."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "chaos").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text('#!/usr/bin/env bash\nshift 3 # -o BatchMode=yes NODE\nexec "$@"\n')
    ssh.chmod(0o755)
    variables = {
        "PATH": f"{ssh.parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{CHAOS}/hook:{CHAOS}/environments",
        "CHAOS_DIR": str(tmp_path / "chaos"),
        "CHAOS_RUN": str(tmp_path / "run"),
        "CHAOS_ENGINE": str(CHAOS / "engine.py"),
        "INFERENCE_SERVER_API_KEY": KEY,
        "NO_KEY": KEY,  # read by the engine
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sampled = {"batch_size": 16, "rollouts_per_example": 4, "sampling": {"max_tokens": 12, "seed": 7}}
    return rl_values(
        tmp_path / "run",
        model={"name": str(make_tiny_model(tmp_path / "model"))},
        orchestrator={**sampled, "env": [{"id": "chaos_letters"}]},
        inference=own_server() | {"lease_seconds": 10, "model": {"max_model_len": 64}},
        trainer_ranks=1,
        max_steps=STEPS,
        max_restarts=1,
        ckpt={"interval": 2},
        nodes=["127.0.0.1", "127.0.0.2", "127.0.0.3"],
        rendezvous_port=free_port(),
    )


def test_lost_rank_of_a_node_restarts_the_ranks_of_all(
    start: StartCommand, tmp_path: Path, on_nodes: dict[str, object]
) -> None:
    run = start("rl", on_nodes, tmp_path / "run")
    run.until_step("trainer", 3)
    beats = read_heartbeats(run.paths)
    assert beats.keys() >= {"orchestrator", "trainer_0", "trainer_1"}
    os.kill(beats["trainer_1"].pid, signal.SIGKILL)
    assert run.end() == 0, run.story()
    events = [json.loads(line) for line in run.paths.events.read_text().splitlines()]
    assert [event["name"] for event in events if event["event"] == "restarted"] == ["trainer"]
    assert next(event["name"] for event in events if event["event"] == "started") == "inference_127.0.0.1"
    assert find_checkpoints(run.paths.checkpoints_dir).steps[-1] == STEPS
