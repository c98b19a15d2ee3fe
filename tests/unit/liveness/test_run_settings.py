"""Processes that were started separately with different settings refuse to work together."""

import pytest

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError
from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.peer_monitor import PeerMonitor
from prime_rl.liveness.run_settings import ProcessSettings, find_difference
from prime_rl.storage.paths import RunPaths

SHARED = ["--model.name", "m", "--max-steps", "4", "--ckpt.interval", "2"]
TRAINER = TrainerConfig.load([*SHARED, "--model.seq-len", "512"]).run_settings
ORCHESTRATOR = OrchestratorConfig.load([*SHARED, "--seq-len", "512", "--env.0.id", "e"]).run_settings
SERVER = {"model.name": "m", "model.dtype": "bfloat16", "model.max_model_len": 512, "max_lora_rank": None}


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({}, None),
        ({"seq_len": 256}, None),
        ({"seq_len": 513}, "seq_len = 513 there is above model.seq_len = 512 here; "
                           "set model.seq_len to 513 or more, or seq_len to 512 or less"),
        ({"max_steps": 8}, "max_steps = 4 here and 8 there; give both the same"),
        ({"max_steps": None}, "max_steps = 4 here and None there; give both the same"),
        ({"model.name": "other"}, "model.name = m here and other there; give both the same"),
        ({"model.revision": "abc"}, "model.revision = None here and abc there; give both the same"),
        ({"tokenizer.name": "other"}, "tokenizer.name = m here and other there; give both the same"),
        ({"async_level": 1}, "async_level = 2 here and 1 there; give both the same"),
        ({"ckpt.interval": None}, "ckpt.interval = 2 here and None there; give both the same"),
        ({"ckpt.path": "/other"}, "ckpt.path = checkpoints here and /other there; give both the same"),
    ],
)  # fmt: skip
def test_find_difference_names_the_setting_and_both_places(changes, difference):
    here = ProcessSettings("here", TRAINER)
    assert find_difference(here, ProcessSettings("there", ORCHESTRATOR | changes)) == difference


def test_find_difference_of_lengths_is_found_from_either_side():
    trainer = ProcessSettings("there", TRAINER)
    found = find_difference(ProcessSettings("here", ORCHESTRATOR | {"seq_len": 513}), trainer)
    assert found is not None and found.startswith("seq_len = 513 here is above model.seq_len = 512 there; ")


@pytest.mark.parametrize(
    ("process", "server", "difference"),
    [
        ({"weight_broadcast.dtype": "bfloat16", "model.lora.rank": None}, {}, None),
        ({"weight_broadcast.dtype": "bfloat16"}, {"model.dtype": "float32"}, None),
        ({"weight_broadcast.dtype": "float16"}, {"model.dtype": "float32"}, None),
        ({"weight_broadcast.dtype": "float32"}, {}, "weight_broadcast.dtype = float32 here and model.dtype = bfloat"),
        ({"weight_broadcast.dtype": "bfloat16"}, {"model.dtype": "float16"}, "weight_broadcast.dtype = bfloat16 here "),
        ({"weight_broadcast.dtype": "float16"}, {}, "weight_broadcast.dtype = float16 here and model.dtype = bfloat"),
        ({"model.lora.rank": 16}, {}, "model.lora.publish = adapter here needs a server with enable_lora = true"),
        ({"model.lora.rank": 16}, {"max_lora_rank": 16}, None),
        ({"model.lora.rank": 17}, {"max_lora_rank": 16}, "model.lora.rank = 17 here is above max_lora_rank = 16 there"),
        ({"model.lora.rank": None}, {"max_lora_rank": 16}, None),
        ({"seq_len": 512}, {}, None),
        ({"seq_len": 513}, {}, "seq_len = 513 here is above model.max_model_len = 512 there; set model.max_model_len"),
        ({"model.name": "folder/m"}, {}, "model.name = folder/m here and m there"),
        ({"model.name": "m", "seq_len": 9, "model.lora.rank": 1, "weight_broadcast.dtype": "float16"}, None, None),
    ],
)  # fmt: skip
def test_find_difference_from_a_server(process, server, difference):
    """A server that reports no settings is not compared."""
    one, other = ProcessSettings("here", process), ProcessSettings("there", {} if server is None else SERVER | server)
    found = find_difference(one, other)
    assert found == difference or (difference is not None and found is not None and found.startswith(difference))
    reverse = find_difference(other, one)
    assert reverse == found or "model.name" in process, "the order matters only for the order of equal keys"


def test_find_difference_of_precisions_says_what_to_set():
    """As for a float16 checkpoint on CUDA, where the trainer publishes bfloat16 by default."""
    one = ProcessSettings("here", {"weight_broadcast.dtype": "bfloat16"})
    found = find_difference(one, ProcessSettings("there", {"model.dtype": "float16"}))
    assert found is not None and found.endswith("set model.dtype to bfloat16, or weight_broadcast.dtype to float16")


def test_trainer_that_publishes_merged_weights_needs_no_adapters():
    arguments = [*SHARED, "--model.lora.rank", "8"]
    assert TrainerConfig.load(arguments).run_settings["model.lora.rank"] is None
    assert TrainerConfig.load([*arguments, "--model.lora.publish", "adapter"]).run_settings["model.lora.rank"] == 8


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


def test_peer_that_joins_later_with_other_settings_is_logged_once(tmp_path, said):
    """It finds this process by its heartbeat, and ends."""
    paths = RunPaths(tmp_path)
    monitor = PeerMonitor(paths, "orchestrator", HeartbeatLimits(5, 60), True, settings=TRAINER)
    with HeartbeatWriter(paths, "orchestrator", "orchestrator", settings=ORCHESTRATOR):
        monitor.compare()
    with HeartbeatWriter(paths, "orchestrator", "orchestrator", settings=ORCHESTRATOR | {"max_steps": 8}):
        monitor.compare()
        monitor.compare()
    refusals = [line for line in said() if "max_steps = 4 here and 8 at orchestrator" in line]
    assert len(refusals) == 1, refusals


def test_peer_that_has_ended_is_not_compared(tmp_path):
    """It may be of an earlier start, before the settings were changed."""
    paths = RunPaths(tmp_path)
    with HeartbeatWriter(paths, "orchestrator", "orchestrator", settings=ORCHESTRATOR | {"max_steps": 8}):
        pass
    PeerMonitor(paths, "orchestrator", HeartbeatLimits(5, 60), True, settings=TRAINER).check()
