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


@pytest.mark.parametrize(
    ("process", "server", "difference"),
    [
        ({"weight_broadcast.dtype": "bfloat16", "model.lora.rank": None}, {}, None),
        ({"weight_broadcast.dtype": "bfloat16"}, {"model.dtype": "float32"}, None),
        ({"weight_broadcast.dtype": "float32"}, {}, "weight_broadcast.dtype = float32 here and model.dtype = bfloat"),
        ({"weight_broadcast.dtype": "bfloat16"}, {"model.dtype": "float16"}, "weight_broadcast.dtype = bfloat16 here "
             "and model.dtype = float16 there: the server would sample from rounded weights; "
             "set model.dtype to bfloat16, or weight_broadcast.dtype to float16"),
        ({"model.lora.rank": 16}, {}, "model.lora.publish = adapter here needs a server with enable_lora = true"),
        ({"model.lora.rank": 16}, {"max_lora_rank": 16}, None),
        ({"model.lora.rank": 17}, {"max_lora_rank": 16}, "model.lora.rank = 17 here is above max_lora_rank = 16 there"),
        ({"model.router_replay": 1}, {"enable_return_routed_experts": 1}, None),
        ({"model.router_replay": 0}, {"enable_return_routed_experts": 0}, None),
        ({"model.router_replay": 1}, {"enable_return_routed_experts": 0}, "model.router_replay = true here needs a "
             "server that records the experts of each token, and the one there does not; add --enable-return-routed"),
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


def test_run_settings_have_adapters_only_if_published_and_absolute_folders(tmp_path, monkeypatch):
    arguments = [*SHARED, "--model.lora.rank", "8"]
    assert TrainerConfig.load(arguments).run_settings["model.lora.rank"] is None
    assert TrainerConfig.load([*arguments, "--model.lora.publish", "adapter"]).run_settings["model.lora.rank"] == 8
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    relative, absolute = (TrainerConfig.load(["--model.name", str(name)]) for name in ("model", tmp_path / "model"))
    assert relative.run_settings == absolute.run_settings


@pytest.fixture
def peer(tmp_path):
    """A function that makes a monitor of an orchestrator, and one that starts its heartbeat with other settings."""
    paths, limits = RunPaths(tmp_path), HeartbeatLimits(5, 60)

    def beat(**changes):
        return HeartbeatWriter(paths, "orchestrator", "orchestrator", settings=ORCHESTRATOR | changes)

    return lambda raises: PeerMonitor(paths, "orchestrator", limits, raises, settings=TRAINER), beat


def test_peer_with_other_settings_ends_the_wait_unless_rl_watches_or_it_has_ended(peer):
    monitor, beat = peer
    with beat(max_steps=8):
        monitor(raises=False).check()
        with pytest.raises(ConfigError, match=r"^max_steps = 4 here and 8 at orchestrator \(pid \d+ on .*give both"):
            monitor(raises=True).check()
    monitor(raises=True).check()  # it may be of an earlier start, before the settings were changed


def test_peer_that_joins_later_with_other_settings_is_logged_once(peer, said):
    """It finds this process by its heartbeat, and ends."""
    make, beat = peer
    monitor = make(raises=True)
    with beat():
        monitor.compare()
    with beat(max_steps=8):
        monitor.compare()
        monitor.compare()
    refusals = [line for line in said() if "max_steps = 4 here and 8 at orchestrator" in line]
    assert len(refusals) == 1, refusals
