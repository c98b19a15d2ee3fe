"""The page of memory in which a process that runs an environment's code records what it does.

It needs only the standard library: it also runs in the interpreter of an environment. The orchestrator reads the page
to find the cause of a death. Before each step of each task of a group the number of the group is written, and a counter
at each tick of the event loop. After any death (`os._exit`, a segmentation fault, an endless function) the page still
contains the group that ran. Code in threads and plain callbacks is not attributed.
"""

import asyncio
import ctypes
import mmap
import os
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any

BEAT_SECONDS = 0.25
"""Interval of the beats of an event loop, seconds."""

current_group: ContextVar[int] = ContextVar("current_group", default=0)
"""The group of the current task, 0 for none; tasks that it creates inherit it."""


class WorkerUnusable(SystemExit):
    """The worker cannot run groups any more: it exits, and its groups are retried in another worker."""


class CrashRecord(ctypes.Structure):
    """The page.

    Attributes:
        running: the request (1, 2, ...) whose code runs now in the worker; 0: none.
        exited_in: the request whose code has raised SystemExit; 0: none.
        beats: number of beats of the worker's event loop.
        sampled: tokens that the worker has sampled so far, over all groups, including those of a worker that dies.
        other_running, other_beats, other_pid: of the process that runs the environment in an interpreter of its own,
            and its process id; 0 without one.
    """

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("running", "exited_in", "beats", "sampled", "other_running", "other_beats", "other_pid")
    ]
    running: int
    exited_in: int
    beats: int
    sampled: int
    other_running: int
    other_beats: int
    other_pid: int

    @classmethod
    def map(cls, fd: int) -> "CrashRecord":
        """Map the page of a memory file; `fd` stays open."""
        return cls.from_buffer(mmap.mmap(fd, mmap.PAGESIZE))

    @classmethod
    def create(cls) -> "tuple[CrashRecord, int]":
        """Create a page; return it and the file descriptor with which another process can map it."""
        fd = os.memfd_create("prime_rl_worker", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        return cls.map(fd), fd

    @property
    def running_request(self) -> "int | None":
        """The request whose code runs, or ran when the worker died; None between requests."""
        return self.other_running or self.exited_in or self.running or None

    def watch(self, loop: asyncio.AbstractEventLoop, *, is_other: bool = False) -> None:
        """Make `loop` record its beats, and each step of the tasks of a group; `is_other` for the other process."""
        prefix = "other_" if is_other else ""

        def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
            group = current_group.get()
            recorded = _RecordedTask(coroutine, self, f"{prefix}running", group) if group else coroutine
            return asyncio.Task(recorded, loop=loop, **options)

        def beat() -> None:
            setattr(self, f"{prefix}beats", getattr(self, f"{prefix}beats") + 1)
            loop.call_later(BEAT_SECONDS, beat)

        loop.set_task_factory(make_task)
        beat()


class _RecordedTask(Coroutine[Any, Any, Any]):
    """A coroutine that records its group while it runs."""

    __slots__ = ("_coroutine", "_field", "_group", "_record")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], record: CrashRecord, field: str, group: int) -> None:
        self._coroutine, self._record, self._field, self._group = coroutine, record, field, group

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *args: Any) -> Any:
        return self._step(self._coroutine.throw, *args)

    def _step(self, step: Callable[..., Any], *args: Any) -> Any:
        setattr(self._record, self._field, self._group)
        try:
            return step(*args)
        except SystemExit as error:  # it ends the worker, but only after the last steps of other tasks
            if self._field == "running" and not isinstance(error, WorkerUnusable):
                self._record.exited_in = self._group
            raise
        finally:
            setattr(self._record, self._field, 0)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # libraries read cr_frame and similar
