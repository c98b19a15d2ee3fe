"""`torchrun` that also reports which rank a signal killed, and whether memory ran out (I7).

A killed rank logs nothing, and the other ranks only report that they lost a rank.

It handles one signal to end, and ignores later ones (a monkey patch of torch 2.11 to 2.13): Slurm sends SIGTERM to all
processes of a step, and `uv run` forwards its own to torchrun as well. The second one would interrupt torchrun while it
waits for its ranks, which are saving a checkpoint.

On one machine it is restricted to the loopback interface, by another patch. torch's rendezvous opens TCP stores on
every interface, without authentication, and unpickles their contents, so anyone who can connect could run code. The
stores get listening sockets on 127.0.0.1.
"""

import gc
import os
import signal
import socket
import sys
from types import FrameType
from typing import Any

from torch import distributed
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
from torch.distributed.run import main as torchrun

from prime_rl.core.entry_point import write_error_file
from prime_rl.core.os_errors import count_oom_kills, describe_signal
from prime_rl.liveness.parent_process import LAUNCHER, NODE_VARIABLE, die_with_parent, is_supervised

_LOOPBACK = "127.0.0.1"
_STORE = distributed.TCPStore


def main() -> None:
    """Run torchrun with its arguments; exit with code 1 if a rank failed, and with 128 + its number after a signal."""
    kills = count_oom_kills()
    # Keep signals ignored which were ignored at the start, such as SIGHUP under `nohup`.
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    handled = [name for name in names if signal.getsignal(signal.Signals[name]) is not signal.SIG_IGN]
    sys.argv[1:1] = ["--signals-to-handle", ",".join(handled)] if len(handled) < len(names) else []
    if is_supervised():
        die_with_parent()
    os.environ[LAUNCHER] = str(os.getpid())  # the ranks exit with this process
    if "--standalone" in sys.argv:
        sys.argv[1:1] = restrict_to_loopback()

    def end(number: int, frame: FrameType | None) -> None:
        for name in handled:
            signal.signal(signal.Signals[name], signal.SIG_IGN)
        raise api.SignalException(f"torchrun got signal {number}", signal.Signals(number))

    api._terminate_process_handler = end
    try:
        torchrun()
    except api.SignalException as error:  # its ranks have ended
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        if (cause := describe_first_failure(error, kills)) is not None:
            print(f"error: {cause}", file=sys.stderr, flush=True)
            write_error_file(cause, 1, replace=True)
        sys.exit(1)
    finally:
        gc.freeze()  # as in run_main


def describe_first_failure(error: ChildFailedError, kills: int) -> str | None:
    """Name the rank that a signal killed; None if each rank exited by itself and reported its error.

    `error` contains the ranks that had failed when torchrun looked, and those that it then ended, at the earliest a
    second later. `kills` is the result of `count_oom_kills` at the start.
    """
    first_time = error.get_first_failure()[1].timestamp
    first_failures = {rank: failure for rank, failure in error.failures.items() if failure.timestamp == first_time}
    killed = {rank: -failure.exitcode for rank, failure in first_failures.items() if failure.exitcode < 0}
    killed = {rank: number for rank, number in killed.items() if number != signal.SIGTERM}
    if not killed:
        return None
    # A rank that lost another one may abort itself, so SIGABRT counts only without another signal.
    rank, number = min(killed.items(), key=lambda one: (one[1] == signal.SIGABRT, one[0]))
    node = f" on {node}" if (node := os.environ.get(NODE_VARIABLE)) else ""
    return f"rank {rank} (pid {error.failures[rank].pid}{node}) {describe_signal(number, kills)}"


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


if __name__ == "__main__":
    main()
