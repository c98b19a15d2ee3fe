"""Restricts torchrun on one machine to the loopback interface (a monkey patch of torch 2.11 to 2.13).

torch's rendezvous opens TCP stores on every interface, without authentication, and unpickles their contents, so anyone
who can connect could run code. This module creates the listening sockets on 127.0.0.1 and passes them to torch.
"""

import os
import socket
from typing import Any

from torch import distributed
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

_LOOPBACK = "127.0.0.1"
_STORE = distributed.TCPStore


def restrict_to_loopback() -> list[str]:
    """Make the stores of this process, and gloo in its ranks, listen on 127.0.0.1; return arguments for torchrun."""
    distributed.TCPStore = c10d_rendezvous_backend.TCPStore = loopback_store
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return [f"--local-addr={_LOOPBACK}"]


def loopback_store(host_name: str, port: int, *args: Any, is_master: bool = False, **kwargs: Any) -> Any:
    """Create a `torch.distributed.TCPStore`; a server listens on 127.0.0.1 only, on a free port if `port` is 0."""
    if not is_master:
        return _STORE(host_name, port, *args, is_master=False, **kwargs)
    listener = socket.create_server((_LOOPBACK, port))
    port = listener.getsockname()[1]
    return _STORE(_LOOPBACK, port, *args, is_master=True, master_listen_fd=listener.detach(), **kwargs)
