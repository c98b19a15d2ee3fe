"""The network interface of gloo on a node whose own name is that of the loopback interface.

gloo listens on the address to which the host name resolves. Debian's /etc/hosts has `127.0.1.1 NAME`, so the ranks of
other nodes could not connect.
"""

import os
import socket

import psutil
import torch.distributed as dist

from prime_rl.core.api_key import is_loopback

_VARIABLE = "GLOO_SOCKET_IFNAME"
_MAIN_ADDRESS = "prime_rl/main_address"


def choose_gloo_interface(store: dist.Store, rank: int, size: int) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that the other nodes reach, if gloo would use the loopback interface.

    The nodes are those of torchrun, at least two. On the first node it is the interface with the address by which the
    last rank reaches this node, on the others that of the route to the first one.
    """
    main = os.environ["MASTER_ADDR"]
    if rank == size - 1:
        store.set(_MAIN_ADDRESS, str(socket.getaddrinfo(main, None)[0][4][0]))
    if _VARIABLE in os.environ or not _has_loopback_name():
        return
    own = store.get(_MAIN_ADDRESS).decode() if os.environ["GROUP_RANK"] == "0" else _address_towards(main)
    for interface, addresses in psutil.net_if_addrs().items():
        if own in (address.address for address in addresses):
            os.environ[_VARIABLE] = interface


def _has_loopback_name() -> bool:
    """Whether the name of this host is unknown, or resolves to the loopback interface."""
    try:
        address = socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
    except OSError:
        return True
    return is_loopback(str(address))


def _address_towards(host: str) -> str:
    """Return the address of this node on the route to another one."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
