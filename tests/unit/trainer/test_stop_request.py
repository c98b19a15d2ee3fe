"""A request to stop reaches the trainer by SIGTERM, or by the file that `rl` and the other ranks write."""

import os
import signal

import pytest
import torch

from prime_rl.liveness.parent_process import SUPERVISED
from prime_rl.storage.checkpoint_artifacts import STOP, StopRecord, find_checkpoints, read_stop, write_stop
from prime_rl.storage.rollback import START_VARIABLE
from prime_rl.trainer.checkpoints.stop_request import StopRequest
from prime_rl.trainer.parallel.process_group import World

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


def test_stop_request_without_checkpoints_never_stops(tmp_path):
    assert not StopRequest(None, 0, ALONE).agree(3)
