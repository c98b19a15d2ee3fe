"""Starts environment workers through the fork server, and restarts the fork server if it dies."""

import asyncio
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from loguru import logger

from prime_rl.core.errors import RunError
from prime_rl.rollouts.separate.crash_record import CrashRecord
from prime_rl.rollouts.workers import fork_server

_SERVER = "prime_rl.rollouts.workers.fork_server"
_MAX_STARTS = 5
"""After so many deaths of the fork server in a row without a worker, the next start would fail as well."""
_DATAGRAM = 65536
_CLOSE_SECONDS = 5.0
_SIGKILL = -9


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A started worker.

    Attributes:
        pid: its process id, also that of its session.
        connection: our end of its socket.
        crash_record: the shared page.
        ended: its exit code when it has exited; minus the number of the signal that killed it.
    """

    pid: int
    connection: socket.socket
    crash_record: CrashRecord
    ended: asyncio.Future[int]


class WorkerLauncher:
    """Starts worker processes for all environments of a run. Use as an async context manager."""

    def __init__(self, withheld: Collection[str] = ()) -> None:
        """Describe the workers, which do not inherit the `withheld` environment variables."""
        self._withheld = frozenset(withheld)
        self._control: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._forks: deque[asyncio.Future[tuple[int, asyncio.Future[int]]]] = deque()
        """Starts without an answer, in the order of the commands."""
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._preloads: list[str] = []

    async def __aenter__(self) -> Self:
        self._ensure_server()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all workers and the fork server."""
        if self._control is None or self._server is None:
            return
        server = self._server
        self._disconnect()  # the fork server kills all workers and exits
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(server.wait, _CLOSE_SECONDS)
            return
        server.kill()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(server.wait, _CLOSE_SECONDS)
            return
        logger.warning("the fork server of environment workers (pid {}) does not exit", server.pid)

    async def start(self, log: Path | None, interpreter: str | None = None) -> WorkerProcess:
        """Start a worker that writes its output to `log`, or to our stderr if it is None.

        `interpreter` is that of its environment, if it has one of its own.

        Raises:
            RunError: the fork server repeatedly dies.
        """
        for _ in range(_MAX_STARTS):
            control = self._ensure_server()
            ours, theirs = socket.socketpair()
            crash_record, page = CrashRecord.create()
            with ExitStack() as failed, theirs, suppress(ConnectionError):  # the fork server has died: start another
                failed.enter_context(ours)  # the worker exits when its connection closes
                try:
                    command = fork_server.encode(fork_server.Fork(str(log) if log else None, interpreter))
                    socket.send_fds(control, [command], [theirs.fileno(), page])
                except ConnectionError:  # noticed before the event loop reads the end of the connection
                    self._disconnect()
                    raise
                finally:
                    os.close(page)
                self._forks.append(forked := asyncio.get_running_loop().create_future())
                pid, ended = await forked
                ours.setblocking(False)
                failed.pop_all()
                return WorkerProcess(pid, ours, crash_record, ended)
        raise RunError(
            f"the fork server of environment workers died {_MAX_STARTS} times in a row; "
            f"run `{sys.executable} -P -m {_SERVER} 0` to see its error"
        )

    def kill(self, process: WorkerProcess) -> None:
        """Kill a worker and its child processes."""
        if not process.ended.done():
            self._send(fork_server.Kill(process.pid))

    def preload(self, module: str) -> None:
        """Import `module` before the next fork."""
        if module not in self._preloads:
            self._preloads.append(module)
            self._send(fork_server.Preload(module))

    def _send(self, command: fork_server.Command) -> None:
        with suppress(ConnectionError):  # the fork server has died, and its workers with it
            if self._control is not None:
                self._control.send(fork_server.encode(command))

    def _ensure_server(self) -> socket.socket:
        if self._control is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                # Not with the event loop: uvloop runs Python code in the child before exec, which crashes if threads of
                # this process have used torch.
                self._server = subprocess.Popen(
                    [sys.executable, "-P", "-m", _SERVER, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    env={name: value for name, value in os.environ.items() if name not in self._withheld},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            ours.setblocking(False)
            asyncio.get_running_loop().add_reader(ours.fileno(), self._read, ours)
            self._control = ours
            for module in self._preloads:
                self._send(fork_server.Preload(module))
        return self._control

    def _read(self, control: socket.socket) -> None:
        with suppress(BlockingIOError):
            while control is self._control:
                data = b""
                with suppress(ConnectionError):
                    data = control.recv(_DATAGRAM)
                if not data:
                    logger.warning("the fork server of environment workers has died; starting another")
                    self._disconnect()
                    return
                match fork_server.decode_event(data):
                    case fork_server.Forked(pid):
                        self._ends[pid] = ended = asyncio.get_running_loop().create_future()
                        if not (forked := self._forks.popleft()).done():
                            forked.set_result((pid, ended))
                    case fork_server.Exited(pid, status):
                        _end(self._ends.pop(pid), status)

    def _disconnect(self) -> None:
        """Close the connection, and mark all workers as ended: they do not outlive the fork server."""
        assert self._control is not None, "called while there is a server"
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        self._control = None
        for end in self._ends.values():
            _end(end, _SIGKILL)
        self._ends.clear()
        for forked in self._forks:
            if not forked.done():
                forked.set_exception(ConnectionResetError("the fork server has died"))
        self._forks.clear()


def _end(end: asyncio.Future[int], status: int) -> None:
    if not end.done():
        end.set_result(status)
