"""Starting the processes of a run, judging how they exited, and stopping them with all their descendants."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from prime_rl.core.entry_point import ReportedError, read_error_file
from prime_rl.core.errors import RunError
from prime_rl.core.os_errors import signal_name
from prime_rl.liveness.parent_process import with_parent_death_signal
from prime_rl.supervisor.process_tree import has_ended

BAD_INPUT = 2
"""Exit code of a process that rejects its input."""

_KILL_ROUND_SECONDS = 1.0
"""Time between two rounds of kills: a process can start another one until it is dead."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start, restart and judge one process of a run.

    Attributes:
        env: complete environment of the process.
        log: file for stdout and stderr; emptied at the first start.
        error: file in which the process may write its error (`prime_rl.core.entry_point.ERROR_FILE`).
        must_finish: the run ends when all such processes have exited with code 0. The others serve until they are
            stopped.
        is_last: this process does the last work of the run. Once it has exited, the others must exit soon.
        fails_alone: the failure of this process ends its own run; the other runs of the trainer continue.
        is_over: whether its own run is over, so that it is not restarted after a failure.
        in_use: whether processes that `rl` did not start need this one.
        start_after: name of the process that must be ready before this one starts; None starts it immediately.
        is_ready: whether the process with this pid, started from this spec, can serve the others.
        restart_spec: the spec of a restart, given the number of restarts that remain after it; None keeps this one.
        num_launcher_restarts: how often the process, if it is a launcher, has restarted its own children.
        needs_rerun: whether another process has undone finished work, so that this one must run again.
        request_stop: asks the process to save a checkpoint and exit with code 0; None if it cannot.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path
    error: Path
    must_finish: bool = True
    is_last: bool = False
    fails_alone: bool = False
    is_over: Callable[[], bool] = lambda: False
    in_use: Callable[[], bool] = lambda: False
    start_after: str | None = None
    is_ready: Callable[[int], bool] = lambda pid: True
    max_restarts: int = 0
    restart_spec: "Callable[[int], ProcessSpec] | None" = None
    num_launcher_restarts: Callable[[], int] = lambda: 0
    needs_rerun: Callable[[], bool] = lambda: False
    request_stop: Callable[[], None] | None = None

    def read_error(self) -> ReportedError | None:
        """The error that the process wrote; None if there is none."""
        return read_error_file(self.error)


class ChildProcess:
    """A started process. It leads its own session, so that Ctrl-C reaches only `rl`, and dies with `rl`.

    Attributes:
        exited: its exit code once it has exited; minus the signal's number if a signal killed it.
    """

    def __init__(self, spec: ProcessSpec, process: subprocess.Popen[bytes]) -> None:
        self.spec, self.pid = spec, process.pid
        self.exited = asyncio.ensure_future(self._wait(process))

    @classmethod
    def start(cls, spec: ProcessSpec, reason: str | None = None) -> Self:
        """Start a process; to be called with a running event loop, from the thread that lives as long as the run.

        The reason of a restart is appended to the log; without one the log is emptied.

        Raises:
            RunError: the process cannot be started, for example because the disk is full.
        """
        try:
            spec.log.parent.mkdir(parents=True, exist_ok=True)
            spec.error.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if reason is None else 0)
            with os.fdopen(os.open(spec.log, flags, 0o666), "ab") as log:  # appends: `rotating_logs` may empty it
                if reason is not None:
                    log.write(f"\n--- {reason} ---\n".encode())
                    log.flush()
                process = subprocess.Popen(
                    with_parent_death_signal(spec.argv),
                    env=dict(spec.env),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise RunError(f"{spec.name} cannot be started: {error.strerror} ({spec.log})") from None
        return cls(spec, process)

    @property
    def has_failed(self) -> bool:
        """Whether it exited with an error, or exited at all although it serves the others."""
        return self.exited.done() and (self.exited.result() != 0 or not self.spec.must_finish)

    @property
    def is_root_cause(self) -> bool:
        """Whether its failure cannot be the effect of another one: killed, a server, or bad input."""
        return self.exited.result() < 0 or not self.spec.must_finish or self.exited.result() == BAD_INPUT

    def terminate(self) -> None:
        """Send SIGTERM unless the process has exited."""
        if not self.exited.done():
            os.kill(self.pid, signal.SIGTERM)  # safe: the child is not reaped yet, so its pid is not reused

    async def _wait(self, process: subprocess.Popen[bytes]) -> int:
        await wait_for_exit([process.pid], None)
        return process.wait()


def describe_exit(code: int | None) -> str:
    """Describe how the process exited; `code` is None if it did not exit after the last step."""
    if code is None:
        return "did not exit after the last step"
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    return f"exited with code {code}" + ("" if code else " before the run was over")


async def find_culprit(children: Sequence[ChildProcess], timeout_seconds: float) -> ChildProcess:
    """Find the process that caused a failure: a killed one, else a server, else the first that exited.

    Waits up to `timeout_seconds`, because the effect can precede its cause: clients of a server fail as soon as its
    engine dies, seconds before the server itself exits.
    """
    failed = [child for child in children if child.has_failed]
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_seconds):
            while not any(child.is_root_cause for child in failed):
                if not (running := [child.exited for child in children if not child.exited.done()]):
                    break
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                failed += [child for child in children if child.has_failed and child not in failed]
    killed = [child for child in failed if child.exited.result() < 0]
    servers = [child for child in failed if not child.spec.must_finish]
    return (killed or servers or failed)[0]


async def wait_for_exit(pids: Sequence[int], timeout_seconds: float | None) -> list[int]:
    """Wait until all processes have exited, at most `timeout_seconds` seconds. Returns those that have not.

    A pidfd becomes readable when its process exits: this needs neither polling nor a thread.
    """
    loop = asyncio.get_running_loop()
    fds: list[int] = []
    exits: dict[int, asyncio.Event] = {}
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                fds.append(os.pidfd_open(pid))
                exits[pid] = asyncio.Event()
                loop.add_reader(fds[-1], exits[pid].set)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                for has_exited in exits.values():
                    await has_exited.wait()
        return [pid for pid, has_exited in exits.items() if not has_exited.is_set()]
    finally:
        for fd in fds:
            loop.remove_reader(fd)
            os.close(fd)


async def save_checkpoints(children: Sequence[ChildProcess], timeout_seconds: float, hurry: asyncio.Event) -> None:
    """Have the children that can save a checkpoint do so and exit; wait for them until `hurry` is set, or the timeout.

    Raises RunError if the request cannot be written.
    """
    asked = [child for child in children if child.spec.request_stop is not None and not child.exited.done()]
    for child in asked:
        assert child.spec.request_stop is not None
        child.spec.request_stop()
    if asked:
        await _unless(hurry, asyncio.wait([child.exited for child in asked]), timeout_seconds)
        hurry.clear()


async def stop_all(
    children: Sequence[ChildProcess],
    stop_seconds: float,
    kill_seconds: float,
    hurry: asyncio.Event,
    ignored: Collection[int] = (),
) -> list[int]:
    """Stop the children and every descendant of this process.

    The children get SIGTERM and have `stop_seconds` to exit; then every process that still descends from this one,
    orphans included, gets SIGKILL, and the kernel has `kill_seconds` to end it.

    Args:
        hurry: set once to skip the rest of `stop_seconds`, and again to give up on processes that SIGKILL does not end.
        ignored: descendants that are no part of the run, and stay.

    Returns:
        The process ids that still exist: those in uninterruptible sleep, and those of another user.
    """
    for child in children:
        child.terminate()
    exits = [child.exited for child in children]
    await _unless(hurry, asyncio.wait(exits), stop_seconds)
    hurry.clear()
    own = {child.pid for child in children}

    async def kill() -> None:
        await kill_all(lambda: descendants(ignored), kill_seconds, own)
        await asyncio.wait(exits)  # the task of each child reaps it

    await _unless(hurry, kill(), kill_seconds)
    return descendants(ignored)


async def _unless(hurry: asyncio.Event, work: Coroutine[Any, Any, object], timeout_seconds: float) -> None:
    """Do `work` until `hurry` is set, at most `timeout_seconds` seconds."""
    task, hurried = asyncio.ensure_future(work), asyncio.ensure_future(hurry.wait())
    await asyncio.wait({task, hurried}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if task.done():
        task.result()  # raises its exception
    task.cancel()


async def kill_all(find: Callable[[], Sequence[int]], kill_seconds: float, own: Collection[int] = ()) -> list[int]:
    """Kill and reap processes until none is left; return the process ids that still exist.

    Args:
        find: returns the process ids that are alive; called again after each round of kills.
        kill_seconds: seconds for the kernel to end them. A process with much GPU memory needs several.
        own: children of this process, which their own tasks reap.
    """
    deadline = time.monotonic() + kill_seconds
    while (left := list(find())) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):  # it has exited, or belongs to another user
                os.kill(pid, signal.SIGKILL)
        await wait_for_exit(left, min(_KILL_ROUND_SECONDS, deadline - time.monotonic()))
        for pid in set(left) - set(own):
            with suppress(ChildProcessError):  # its own parent reaps it
                os.waitpid(pid, os.WNOHANG)
    return left


def descendants(ignored: Collection[int] = ()) -> list[int]:
    """Process ids of all living descendants of this process but the ignored ones."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.pid not in ignored and not has_ended(process):
                found.append(process.pid)
    return found
