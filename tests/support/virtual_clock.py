"""A clock for tests that wait: it advances when nothing else can happen, so waits take no time at any load.

For tests without other processes: the clock does not wait for them. It does wait for threads of `asyncio` and `anyio`,
and for bytes that are on their way between two sockets of this process.
"""

import asyncio
import fcntl
import functools
import selectors
import struct
import termios
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import anyio.to_thread
import pytest

_MAX_CHECKS, _CHECK_SECONDS = 100, 0.01
"""Bytes that are still on their way after so many checks wait for a task that reads, not for the kernel."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time, with `time.monotonic` while it runs, advances only when all tasks wait."""

    def __init__(self) -> None:
        self.now, self.threads = 1000.0, set[Any]()
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now

    def run_forever(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", self.time)
            patch.setattr(asyncio, "wrap_future", self.wrap_future)
            patch.setattr(asyncio.futures, "wrap_future", self.wrap_future)
            patch.setattr(anyio.to_thread, "run_sync", lambda call, *args, **_: asyncio.to_thread(call, *args))
            super().run_forever()

    def wrap_future(self, future: Any, *, loop: Any = None) -> Any:
        """Wait in real time while a thread works."""
        wrapped = _wrap_future(future, loop=self)
        self.threads.add(wrapped)
        wrapped.add_done_callback(self.threads.discard)
        return wrapped


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            events = super().select(60)  # for a thread that `asyncio` has started itself, as at its end
            assert events or self._loop.threads, "all tasks wait for each other"
        else:
            events = super().select(timeout if self._loop.threads else 0)
            for _ in range(_MAX_CHECKS):
                if events or not timeout or not any(map(_num_in_flight, self.get_map())):
                    break
                events = super().select(_CHECK_SECONDS)
        if not events and timeout:
            self._loop.now += timeout
        return events


def _num_in_flight(file: int) -> int:
    """Bytes that were sent to a socket and that its other end has not confirmed."""
    with suppress(OSError):  # a socket that listens
        return struct.unpack("i", fcntl.ioctl(file, termios.TIOCOUTQ, bytes(4)))[0]
    return 0


_wrap_future = asyncio.wrap_future


def virtual_clock(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test with a `VirtualLoop`."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
