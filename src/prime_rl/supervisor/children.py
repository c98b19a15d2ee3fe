"""Starting the processes of a run, waiting for them, and ending them with all their descendants.

A child is watched through its pidfd, which becomes readable when it ends: no polling, no thread. Each child leads a
session of its own, so that Ctrl-C reaches `rl` alone, and dies with `rl` by the kernel's hand.
"""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from prime_rl.errors import RunError
from prime_rl.supervisor.process import set_parent_death_signal


@dataclass(frozen=True, slots=True)
class Role:
    """What to start.

    Attributes:
        name: `trainer`, `orchestrator` or `inference`.
        argv: the command.
        env: the whole environment of the process.
        log: file that takes its stdout and stderr; emptied at the first start.
        error: file in which it may leave its error (`prime_rl.errors.ERROR_FILE`).
        finishes: the run is over when all roles that finish have ended with exit code 0; the others serve until told
            to stop.
        last: it does the last of the work, so once it has ended the others that finish must follow soon.
        restarts: how often it may be started again after it has failed.
        again: what to start then, given how many more times it may be started; None is the same.
        restarted: how often a launcher that is the role's child has started it again by itself.
        recalled: whether work that it had finished has been undone by another, so that it is started once more.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path
    error: Path
    finishes: bool = True
    last: bool = False
    restarts: int = 0
    again: "Callable[[int], Role] | None" = None
    restarted: Callable[[], int] = lambda: 0
    recalled: Callable[[], bool] = lambda: False

    def told(self) -> dict[str, Any] | None:
        """The error that it left behind: {"code", "message"}; None if it left none."""
        with suppress(OSError, ValueError):
            error = json.loads(self.error.read_text())
            return error if {"code", "message"} <= error.keys() else None
        return None


class Child:
    """A started role.

    Attributes:
        role: what was started.
        pid: its process id.
        ended: its exit code once it has ended; minus the signal's number if a signal killed it.
    """

    def __init__(self, role: Role, process: subprocess.Popen[bytes]) -> None:
        self.role, self.pid = role, process.pid
        self.ended = asyncio.ensure_future(self._wait(process))

    @classmethod
    def start(cls, role: Role, again: str | None = None) -> Self:
        """Start a role. Call it from the thread that lasts, with a running event loop.

        Args:
            role: what to start.
            again: a line for its log, which then keeps what is in it; None empties the log.

        Raises:
            RunError: it cannot be started: the disk is full, no such command ...
        """
        supervisor = os.getpid()

        def before_exec() -> None:
            set_parent_death_signal()
            if os.getppid() != supervisor:
                os._exit(1)

        try:
            role.log.parent.mkdir(parents=True, exist_ok=True)
            role.error.unlink(missing_ok=True)
            with role.log.open("wb" if again is None else "ab") as log:
                if again is not None:
                    log.write(f"\n--- {again} ---\n".encode())
                    log.flush()
                process = subprocess.Popen(
                    role.argv,
                    env=dict(role.env),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=before_exec,
                )
        except OSError as error:
            raise RunError(f"{role.name} cannot be started: {error.strerror} ({role.log})") from None
        return cls(role, process)

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        if not self.ended.done():
            os.kill(self.pid, signal.SIGTERM)  # not reaped yet, so the id is still its own

    async def _wait(self, process: subprocess.Popen[bytes]) -> int:
        await exits([process.pid], None)
        return process.wait()


async def exits(pids: Sequence[int], timeout_s: float | None) -> bool:
    """Wait until all processes have exited, or for `timeout_s` seconds. Returns whether all have."""
    loop = asyncio.get_running_loop()
    fds: list[int] = []
    futures: list[asyncio.Future[None]] = []
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                fds.append(os.pidfd_open(pid))
                futures.append(loop.create_future())
                loop.add_reader(fds[-1], _set, futures[-1])
        if futures:
            await asyncio.wait(futures, timeout=timeout_s)
        return all(future.done() for future in futures)
    finally:
        for fd in fds:
            loop.remove_reader(fd)
            os.close(fd)


async def end_all(children: Sequence[Child], grace_s: float, kill_s: float, hurry: asyncio.Event) -> list[int]:
    """End the children and every descendant of this process.

    First the children are asked (SIGTERM) and have `grace_s` seconds to end in order; then whatever still descends
    from this process, orphans included, is killed.

    Args:
        children: the started roles.
        grace_s: seconds for an orderly end.
        kill_s: seconds for the kernel to carry out the kills.
        hurry: set to cut the grace short.

    Returns:
        Process ids that are still there; empty unless the kernel holds one (a process in uninterruptible sleep).
    """
    for child in children:
        child.terminate()
    waits = [child.ended for child in children if not child.ended.done()]
    if waits:
        impatience = asyncio.ensure_future(hurry.wait())
        everyone = asyncio.ensure_future(asyncio.wait(waits))
        await asyncio.wait({everyone, impatience}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        impatience.cancel()
        everyone.cancel()
    own = {child.pid for child in children}
    deadline = time.monotonic() + kill_s
    while (left := _descendants()) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await exits(left, deadline - time.monotonic())
        for pid in set(left) - own:
            with suppress(ChildProcessError):  # somebody else's child, who will reap it
                os.waitpid(pid, os.WNOHANG)
    # Reaping a killed child of ours is the business of its own task.
    await asyncio.wait([child.ended for child in children], timeout=max(0.0, deadline - time.monotonic()))
    return _descendants()


async def end_orphans(pids: Sequence[int], kill_s: float) -> None:
    """Kill what a child has left behind, and wait for its end; `kill_s` seconds at most."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await exits(pids, kill_s)
    for pid in pids:
        with suppress(ChildProcessError):  # somebody else's child, who will reap it
            os.waitpid(pid, os.WNOHANG)


def _descendants() -> list[int]:
    """Process ids of all that descend from this process and are not dead already."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
