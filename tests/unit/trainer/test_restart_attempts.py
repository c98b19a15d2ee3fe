"""Ranks of a restart attempt use their own part of torchrun's store."""

from datetime import timedelta

import torch.distributed as dist

from prime_rl.trainer.parallel.process_group import _rendezvous_options

TIMEOUT = timedelta(seconds=10)


def place(monkeypatch, attempt, local=1, size=1):
    variables = {"TORCHELASTIC_RESTART_COUNT": attempt, "LOCAL_WORLD_SIZE": local, "WORLD_SIZE": size, "RANK": 0}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return _rendezvous_options(TIMEOUT)


def test_store_of_an_attempt_does_not_contain_earlier_attempts(monkeypatch):
    """torchrun's own store outlives the attempts."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    first, second = place(monkeypatch, 0), place(monkeypatch, 1)
    first["store"].set("address", "of a rank that dies")
    assert first["store"].check(["address"])
    assert not second["store"].check(["address"])
    assert (second["rank"], second["world_size"]) == (0, 1)


def test_store_on_several_nodes_has_no_prefix(monkeypatch):
    assert place(monkeypatch, 1, local=1, size=2) == {}
