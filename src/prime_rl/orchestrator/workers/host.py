"""Main's side of the fork server: starts workers, hears of their ends, and starts the server anew should it die."""

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from loguru import logger

from prime_rl.errors import RunError
from prime_rl.orchestrator.workers.blackbox import BlackBox
from prime_rl.orchestrator.workers.forkserver import (
    Command,
    Exited,
    Fork,
    Forked,
    Kill,
    Preload,
    decode_event,
    encode,
)

_SERVER = "prime_rl.orchestrator.workers.forkserver"
_MOST_STARTS = 5
"""How often in a row the fork server may die before a worker is there: more often, and it always will."""
_DATAGRAM = 65536
_CLOSE_S = 5.0
_SIGKILL = -9


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A started worker.

    Attributes:
        pid: its process id, also that of its session.
        connection: main's end of its socket.
        box: the page that it shares with main.
        ended: its exit code once it has ended; minus the signal's number if a signal killed it.
    """

    pid: int
    connection: socket.socket
    box: BlackBox
    ended: asyncio.Future[int]


class WorkerHost:
    """Starts worker processes within milliseconds. One serves all environments of a run; use as a context manager."""

    def __init__(self) -> None:
        """Nothing is started yet."""
        self._control: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._starting = asyncio.Lock()
        self._jobs: dict[int, asyncio.Future[int]] = {}
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._next_job = 0
        self._preloads: list[str] = []

    async def __aenter__(self) -> Self:
        await self._ensure_server()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End every worker and the server."""
        if self._control is None or self._server is None:
            return
        server = self._server
        self._hang_up()  # upon which it kills all workers and ends
        try:
            await asyncio.to_thread(server.wait, _CLOSE_S)
        except subprocess.TimeoutExpired:
            server.kill()
            try:
                await asyncio.to_thread(server.wait, _CLOSE_S)
            except subprocess.TimeoutExpired:
                logger.warning("the kernel holds process {}, from which environment workers are forked", server.pid)

    async def start(self, log: Path | None) -> WorkerProcess:
        """Start a worker.

        Args:
            log: file that its output is appended to; None leaves it where main's errors go.

        Raises:
            RunError: the process that workers are forked from dies whenever it is started.
        """
        for _ in range(_MOST_STARTS):
            control = await self._ensure_server()
            job, forked = self._next_job, asyncio.get_running_loop().create_future()
            self._next_job += 1
            self._jobs[job] = forked
            ours, theirs = socket.socketpair()
            box, page = BlackBox.create()
            try:
                socket.send_fds(control, [encode(Fork(job, str(log) if log else None))], [theirs.fileno(), page])
                pid = await forked
            except (ConnectionError, BrokenPipeError):
                ours.close()
                continue  # the server has died; the next round starts another
            except BaseException:
                ours.close()  # upon which the worker ends by itself
                raise
            finally:
                theirs.close()
                os.close(page)
                self._jobs.pop(job, None)
            ours.setblocking(False)
            return WorkerProcess(pid, ours, box, self._ends[pid])
        raise RunError(
            f"the process that environment workers are forked from died {_MOST_STARTS} times in a row; "
            f"`{sys.executable} -P -m {_SERVER} 0` says why"
        )

    def kill(self, process: WorkerProcess) -> None:
        """End a worker and all that it started, at once."""
        if not process.ended.done():
            self._tell(Kill(process.pid))

    def preload(self, module: str) -> None:
        """Import `module` before the next fork."""
        if module not in self._preloads:
            self._preloads.append(module)
            self._tell(Preload(module))

    def _tell(self, command: Command) -> None:
        with suppress(ConnectionError):  # it has died, and its workers with it
            if self._control is not None:
                self._control.send(encode(command))

    async def _ensure_server(self) -> socket.socket:
        async with self._starting:
            if self._control is not None:
                return self._control
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                # Not by the event loop: uvloop runs Python code in the child before it becomes another program, which
                # crashes there if threads of this process have used torch. This way takes a millisecond.
                self._server = subprocess.Popen(
                    [sys.executable, "-P", "-m", _SERVER, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            ours.setblocking(False)
            asyncio.get_running_loop().add_reader(ours.fileno(), self._read, ours)
            self._control = ours
            for module in self._preloads:
                self._tell(Preload(module))
            return ours

    def _read(self, control: socket.socket) -> None:
        with suppress(BlockingIOError):
            while control is self._control:
                try:
                    data = control.recv(_DATAGRAM)
                except ConnectionError:
                    data = b""
                if not data:
                    logger.warning("the process that environment workers are forked from has died; starting another")
                    self._hang_up()
                    return
                match decode_event(data):
                    case Forked(job, pid):
                        self._ends[pid] = asyncio.get_running_loop().create_future()
                        if (future := self._jobs.get(job)) is not None and not future.done():
                            future.set_result(pid)
                    case Exited(pid, status):
                        _end(self._ends.pop(pid), status)

    def _hang_up(self) -> None:
        """Close the line. Whether the server dies of it or has died, its workers do not outlive it."""
        assert self._control is not None, "called while there is a server"
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        self._control = None
        for end in self._ends.values():
            _end(end, _SIGKILL)
        self._ends.clear()
        for job in self._jobs.values():
            if not job.done():
                job.set_exception(ConnectionResetError("the fork server has died"))


def _end(end: asyncio.Future[int], status: int) -> None:
    if not end.done():
        end.set_result(status)
