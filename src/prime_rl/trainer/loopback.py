"""torchrun on one machine listens to that machine only.

A monkey patch of torch (2.11 to 2.13). Its rendezvous keeps a store of its own and one for the ranks, both TCP servers
on every interface that ask for no name and no key; and the rendezvous unpickles what it finds in its store. So whoever
reaches the machine could run code in it. Here the listening sockets are made by us, on 127.0.0.1, and handed to torch.
Without it tests/unit/trainer/test_loopback.py fails.
"""

import os
import socket
from typing import Any

from torch import distributed
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

_HERE = "127.0.0.1"
_STORE = distributed.TCPStore


def stay_on_this_machine() -> list[str]:
    """Have all stores that this process serves, and gloo in its ranks, listen on 127.0.0.1.

    Returns:
        The arguments that torchrun needs for it.
    """
    distributed.TCPStore = c10d_rendezvous_backend.TCPStore = local_store
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return [f"--local-addr={_HERE}"]


def local_store(host_name: str, port: int, *args: Any, is_master: bool = False, **kwargs: Any) -> Any:
    """Make `torch.distributed.TCPStore`, a server's on 127.0.0.1 only; port 0 takes a free one.

    Raises:
        DistNetworkError: the port is in use, or nobody serves there.
    """
    if not is_master:
        return _STORE(host_name, port, *args, is_master=False, **kwargs)
    listener = socket.create_server((_HERE, port))
    port = listener.getsockname()[1]
    return _STORE(_HERE, port, *args, is_master=True, master_listen_fd=listener.detach(), **kwargs)
