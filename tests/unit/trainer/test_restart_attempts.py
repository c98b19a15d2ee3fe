"""Ranks of a restart attempt use their own part of torchrun's store."""

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from prime_rl.trainer.parallel.process_group import _rendezvous_options

TIMEOUT = timedelta(seconds=60)


def place(monkeypatch, attempt, rank=0, size=1):
    variables = {"TORCHELASTIC_RESTART_COUNT": attempt, "LOCAL_WORLD_SIZE": 1, "WORLD_SIZE": size, "RANK": rank}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return _rendezvous_options(TIMEOUT)


@pytest.fixture
def agent(monkeypatch):
    """torchrun's own store, which outlives the attempts."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT)
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in {**variables, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    return store


def test_store_of_an_attempt_does_not_contain_earlier_attempts(agent, monkeypatch):
    first, second = place(monkeypatch, 0), place(monkeypatch, 1)
    first["store"].set("address", "of a rank that dies")
    assert first["store"].check(["address"])
    assert not second["store"].check(["address"])
    assert (second["rank"], second["world_size"]) == (0, 1)


def test_store_on_several_nodes_is_the_same_if_they_count_attempts_differently(agent, monkeypatch):
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(agent, int(os.environ["RANK"]), 2)]))
    first, second = place(monkeypatch, 0, size=2), place(monkeypatch, 1, rank=1, size=2)
    first["store"].set("address", "of a rank")
    assert second["store"].check(["address"])
    assert (second["rank"], second["world_size"]) == (1, 2)
