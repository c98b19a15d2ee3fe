"""Processes that were started separately with different settings refuse to work together."""

import pytest

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError
from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.peer_monitor import PeerMonitor
from prime_rl.liveness.run_settings import find_difference
from prime_rl.storage.paths import RunPaths

SHARED = ["--model.name", "m", "--max-steps", "4", "--ckpt.interval", "2"]
TRAINER = TrainerConfig.load([*SHARED, "--model.seq-len", "512"]).run_settings
ORCHESTRATOR = OrchestratorConfig.load([*SHARED, "--seq-len", "512", "--env.0.id", "e"]).run_settings


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({}, None),
        ({"seq_len": 256}, None),
        ({"seq_len": 513}, "model.seq_len = 512 here is below seq_len = 513"),
        ({"max_steps": 8}, "max_steps = 4 here and 8"),
        ({"max_steps": None}, "max_steps = 4 here and None"),
        ({"model.name": "other"}, "model.name = m here and other"),
        ({"async_level": 1}, "async_level = 2 here and 1"),
        ({"ckpt.interval": None}, "ckpt.interval = 2 here and None"),
    ],
)
def test_find_difference_names_the_setting_and_both_values(changes, difference):
    assert find_difference(TRAINER, ORCHESTRATOR | changes) == difference


def test_find_difference_of_lengths_is_named_from_either_side():
    found = find_difference(ORCHESTRATOR | {"seq_len": 513}, TRAINER)
    assert found == "seq_len = 513 here is above model.seq_len = 512"


def test_model_folder_is_compared_by_its_absolute_path(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    relative, absolute = (TrainerConfig.load(["--model.name", str(name)]) for name in ("model", tmp_path / "model"))
    assert relative.run_settings == absolute.run_settings


@pytest.mark.parametrize("raises", [True, False])
def test_peer_with_other_settings_ends_the_wait_unless_rl_watches(tmp_path, raises):
    paths = RunPaths(tmp_path)
    monitor = PeerMonitor(paths, "orchestrator", HeartbeatLimits(5, 60), raises, settings=TRAINER)
    orchestrator = HeartbeatWriter(paths, "orchestrator", "orchestrator", settings=ORCHESTRATOR | {"max_steps": 8})
    with orchestrator:
        if not raises:
            monitor.check()
            return
        with pytest.raises(ConfigError, match=r"^max_steps = 4 here and 8 at orchestrator \(pid \d+ on .*give both"):
            monitor.check()


def test_peer_that_has_ended_is_not_compared(tmp_path):
    """It may be of an earlier start, before the settings were changed."""
    paths = RunPaths(tmp_path)
    with HeartbeatWriter(paths, "orchestrator", "orchestrator", settings=ORCHESTRATOR | {"max_steps": 8}):
        pass
    PeerMonitor(paths, "orchestrator", HeartbeatLimits(5, 60), True, settings=TRAINER).check()
