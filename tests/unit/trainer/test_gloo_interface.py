"""The interface of gloo on hosts whose names are those of the loopback interface."""

import os
import socket

import pytest
import torch.distributed as dist

from prime_rl.trainer.parallel.gloo_interface import choose_gloo_interface

VARIABLE = "GLOO_SOCKET_IFNAME"


@pytest.fixture
def choose(monkeypatch):
    """Choose the interface of rank 0 or 1, each on a node of its own, whose host has this name."""

    def choose(rank, name, **variables):
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.setattr(socket, "gethostname", lambda: name)
        for key, value in {"MASTER_ADDR": "127.0.0.1", "GROUP_RANK": str(rank), **variables}.items():
            monkeypatch.setenv(key, value)
        store = dist.HashStore()
        if rank == 0:
            store.set("prime_rl/main_address", "127.0.0.1")
        choose_gloo_interface(store, rank, 2)
        return os.environ.get(VARIABLE)

    return choose


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["localhost", "no-such-host.invalid"])
def test_interface_to_the_other_node_replaces_the_loopback_name(choose, rank, name):
    assert choose(rank, name) == "lo"  # the other node is this machine, too


def test_interface_is_kept_if_the_name_is_reachable_or_the_user_has_set_one(choose):
    assert choose(1, "192.0.2.7") is None
    assert choose(1, "localhost", **{VARIABLE: "eth7"}) == "eth7"
