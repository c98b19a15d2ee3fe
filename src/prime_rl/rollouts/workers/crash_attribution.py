"""A page of memory shared by the orchestrator and a worker, to find the cause of the death of a worker.

The worker writes the current group before each step of each of the group's tasks, and a counter at each tick of its
event loop. After any death (`os._exit`, a segmentation fault, an endless function) the page still contains the group
that ran. Code in threads and plain callbacks is not attributed.
"""

import asyncio
import ctypes
import mmap
import os
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, Self

current_group: ContextVar[int] = ContextVar("current_group", default=0)
"""The group of the current task, 0 for none; tasks that it creates inherit it."""


class CrashRecord(ctypes.Structure):
    """The shared page.

    Attributes:
        running: the request (1, 2, ...) whose code runs now; 0: none.
        exited_in: the request whose code has raised SystemExit; 0: none.
        beats: number of beats of the worker's event loop.
        sampled: tokens that the worker has sampled so far, over all groups, including those of a worker that dies.
    """

    _fields_ = [(name, ctypes.c_int64) for name in ("running", "exited_in", "beats", "sampled")]
    running: int
    exited_in: int
    beats: int
    sampled: int

    @classmethod
    def map(cls, fd: int) -> Self:
        """Map the page of a memory file; `fd` stays open."""
        return cls.from_buffer(mmap.mmap(fd, mmap.PAGESIZE))

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """Create a page; return it and the file descriptor with which another process can map it."""
        fd = os.memfd_create("prime_rl_worker", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        return cls.map(fd), fd

    @property
    def running_request(self) -> int | None:
        """The request whose code runs, or ran when the worker died; None between requests."""
        return self.exited_in or self.running or None

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make `loop` record each step of the tasks of a group."""

        def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
            group = current_group.get()
            return asyncio.Task(_RecordedTask(coroutine, self, group) if group else coroutine, loop=loop, **options)

        loop.set_task_factory(make_task)


class _RecordedTask(Coroutine[Any, Any, Any]):
    """A coroutine that records its group while it runs."""

    __slots__ = ("_coroutine", "_group", "_record")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], record: CrashRecord, group: int) -> None:
        self._coroutine, self._record, self._group = coroutine, record, group

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *args: Any) -> Any:
        return self._step(self._coroutine.throw, *args)

    def _step(self, step: Callable[..., Any], *args: Any) -> Any:
        self._record.running = self._group
        try:
            return step(*args)
        except SystemExit:  # it ends the process, but only after the last steps of other tasks
            self._record.exited_in = self._group
            raise
        finally:
            self._record.running = 0

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # libraries read cr_frame and similar
