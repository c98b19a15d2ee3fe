"""The setup of a rank: settings of the ranks of several nodes, and garbage collection at an interval."""

import gc
import os
import signal
import weakref
from contextlib import ExitStack, closing
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError
from prime_rl.liveness.parent_process import SUPERVISED
from prime_rl.storage.checkpoint_artifacts import STOP, StopRecord, find_checkpoints, read_stop, write_stop
from prime_rl.storage.rollback import START_VARIABLE
from prime_rl.trainer.parallel.process_group import World, _rendezvous_options, wrap_rank_errors
from prime_rl.trainer.process_setup import GarbageCollection, StopRequest, check_rank_settings, limit_process
from tests.unit.trainer.world import run_world


def test_limit_process_deterministic_refuses_other_operations(monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    try:
        limit_process(deterministic=True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"
        with pytest.raises(ConfigError, match=r"deterministic = true is not possible .* put_"), wrap_rank_errors(1):
            torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)


CASES = {
    "same": ([], [], None),
    "paths": (["--output-dir", "a", "--log.level", "debug"], ["--output-dir", "b", "--wandb"], None),
    "rate": (["--optim.lr", "1e-3"], ["--optim.lr", "1e-5"], "optim.lr = 0.001 at rank 0 on "),
    "block": (["--model.lora.rank", "4"], [], "model.lora = set at rank 0 on "),
    "kind": ([], ["--loss.type", "ppo"], "loss.type = aipo at rank 0 on "),
}


def _refusals(world, cases):
    """The error of each case on this rank, which is alone on its node."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    found = {}
    for name, arguments in cases.items():
        config = TrainerConfig.load(["--model.name", "m", *arguments[world.rank % 2]])
        try:
            check_rank_settings(config, world)
        except ConfigError as error:
            found[name] = str(error)
    return found


def test_check_rank_settings_refuses_what_decides_the_result(tmp_path):
    refusals, other = run_world(2, _refusals, {name: case[:2] for name, case in CASES.items()}, tmp_path)
    assert refusals == other, "all ranks raise the same error"
    assert refusals.keys() == {name for name, case in CASES.items() if case[2]}
    for name, message in refusals.items():
        assert message.startswith(CASES[name][2]) and "at rank 1 on " in message
        assert message.endswith("; give all ranks the same")


class Cycle:
    def __init__(self):
        self.me = self


@pytest.fixture
def collect():
    """Start the collection at an interval, which is ended after the test."""
    with ExitStack() as stack:
        yield lambda interval: stack.enter_context(closing(GarbageCollection(interval)))
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_garbage_is_collected_at_the_interval_only(collect):
    garbage, alive = collect(3), []
    for step in range(4, 9):
        watched = weakref.ref(Cycle())
        for _ in range(3000):  # more than the thresholds of automatic collection
            Cycle()
        garbage.step_done(step)
        alive.append(watched() is not None)
    assert alive == [True, False, True, True, False]  # steps 5 and 8 end a third step
    assert not gc.isenabled()


def test_garbage_of_objects_that_survived_a_collection_is_collected_later(collect):
    garbage, kept = collect(1), Cycle()
    watched = weakref.ref(kept)
    garbage.step_done(0)
    garbage.step_done(1)
    del kept
    garbage.step_done(2)
    assert watched() is None


# A request to stop reaches the trainer by SIGTERM, or by the file that `rl` and the other ranks write


ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(autouse=True)
def start(monkeypatch):
    monkeypatch.setenv(START_VARIABLE, "this start")


def test_stop_request_sigterm_is_agreed_and_announced(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(tmp_path, 2, ALONE) as stop:
        assert not stop.agree(4)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agree(5) and stop.is_agreed
    assert read_stop(tmp_path) == StopRecord(5, 2, "this start")
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("record", "requested"),
    [
        (StopRecord(start="this start"), True),
        (StopRecord(start="an earlier start"), False),
        (StopRecord(), False),
        (StopRecord(5, 2), True),
        (StopRecord(5, 1), False),
        (StopRecord(4, 2), False),
    ],
)
def test_stop_request_file_counts_for_this_start_or_step_only(tmp_path, record, requested):
    stop = StopRequest(tmp_path, 2, ALONE)
    write_stop(tmp_path, record)
    assert stop.agree(5) is requested


@pytest.mark.parametrize(("record", "kept"), [(StopRecord(start="this start"), True), (StopRecord(0, 0), False)])
def test_stop_request_of_an_earlier_start_is_removed(tmp_path, record, kept):
    """A run without a checkpoint starts at the same step of the same branch again."""
    write_stop(tmp_path, record)
    assert not find_checkpoints(tmp_path).broken
    with StopRequest(tmp_path, 0, ALONE) as stop:
        assert (tmp_path / STOP).exists() is kept
        assert stop.agree(0) is kept


def test_stop_request_under_rl_leaves_sigterm_alone(tmp_path, monkeypatch):
    monkeypatch.setenv(SUPERVISED, "1")
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(tmp_path, 0, ALONE):
        assert signal.getsignal(signal.SIGTERM) == before
    assert not StopRequest(None, 0, ALONE).agree(3), "without checkpoints"


# Ranks of a restart attempt use their own part of torchrun's store


TIMEOUT = timedelta(seconds=60)


def place(monkeypatch, agent, attempt, rank=0, size=1):
    """The part of torchrun's own store `agent`, which outlives the attempts."""
    variables = {
        "TORCHELASTIC_RESTART_COUNT": attempt, "LOCAL_WORLD_SIZE": 1, "WORLD_SIZE": size, "RANK": rank,
        "TORCHELASTIC_USE_AGENT_STORE": True, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": agent.port,
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    if size > 1:
        monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(agent, rank, size)]))
    options = _rendezvous_options(TIMEOUT)
    assert (options["rank"], options["world_size"]) == (rank, size)
    return options["store"]


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_store_of_an_attempt_contains_earlier_attempts_of_other_nodes_only(monkeypatch, num_nodes):
    """Several nodes may count the attempts differently."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT)
    first, second = place(monkeypatch, agent, 0, 0, num_nodes), place(monkeypatch, agent, 1, num_nodes - 1, num_nodes)
    first.set("address", "of a rank")
    assert first.check(["address"])
    assert second.check(["address"]) is (num_nodes == 2)
