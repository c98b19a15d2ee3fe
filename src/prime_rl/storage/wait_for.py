"""Waiting for files to appear, with an owner and a deadline for every wait (I7).

What a hanging disk or network may block runs in threads that do not prevent the process from exiting.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from watchfiles import watch
from watchfiles._rust_notify import WatchfilesRustInternalError

from prime_rl.core.errors import RunError

Value = TypeVar("Value")

# Watching is only an optimization: network file systems send no events, and the kernel limits the number of watchers.
# The path is therefore also checked four times a second.
_RECHECK_MS = 250
_DEBOUNCE_MS = 5
_NO_WATCHER = (OSError, WatchfilesRustInternalError)


class DeadlineError(RunError):
    """A wait timed out; the message names the file and the process that should have written it."""


def wait_for(path: Path, timeout_seconds: float, owner: str, check: Callable[[], None] = lambda: None) -> None:
    """Block until `path` exists.

    Args:
        path: its parent is created if missing, so that it can be watched.
        timeout_seconds: longest wait.
        owner: the process that writes the path, and its log, for the error.
        check: called repeatedly; raises to abort the wait.

    Raises:
        DeadlineError: the wait timed out.
    """
    what = f"{path}, which {owner} should have written"
    wait_until(path.parent, path.exists, timeout_seconds, what, check)


def wait_until(
    directory: Path,
    condition: Callable[[], bool],
    timeout_seconds: float,
    what: str,
    check: Callable[[], object] = lambda: None,
) -> None:
    """Block until a condition on the contents of `directory` is true; otherwise like `wait_for`.

    If `check` returns a true value, the time so far does not count.
    """
    for _ in wait_in_turns(directory, condition, timeout_seconds, what, check):
        pass


def wait_in_turns(
    directory: Path,
    condition: Callable[[], bool],
    timeout_seconds: float,
    what: str,
    check: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Wait like `wait_until`, and yield at least four times a second until the condition is true."""
    deadline = time.monotonic() + timeout_seconds
    directory.mkdir(parents=True, exist_ok=True)
    if condition():
        return
    for _ in _ticks(directory, threading.Event()):
        if condition():
            return
        if check():
            deadline = time.monotonic() + timeout_seconds
        elif time.monotonic() > deadline:
            raise DeadlineError(f"waited {timeout_seconds:.0f} s for {what}")
        yield


async def watch_directory(directory: Path, stop: asyncio.Event) -> AsyncIterator[None]:
    """Yield whenever `directory` may have changed: immediately, at each event, and four times a second."""
    await run_in_daemon_thread(partial(directory.mkdir, parents=True, exist_ok=True))
    yield
    loop, changed, over = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def watch_in_thread() -> None:
        with suppress(RuntimeError):  # the event loop is closed
            for _ in _ticks(directory, over):
                if over.is_set():
                    return
                loop.call_soon_threadsafe(changed.set)

    watching = asyncio.wrap_future(start_daemon_future(watch_in_thread, "watch_directory"))
    stopping = asyncio.ensure_future(stop.wait())
    for end in (watching, stopping):
        end.add_done_callback(lambda _: changed.set())
    try:
        while await changed.wait() and not stop.is_set():
            if watching.done():
                watching.result()
            changed.clear()
            yield
    finally:
        over.set()
        stopping.cancel()


def _ticks(directory: Path, stop: threading.Event) -> Iterator[None]:
    """Yield at each event and four times a second, until `stop` is set."""
    with suppress(*_NO_WATCHER):
        for _ in watch(
            directory, stop_event=stop, debounce=_DEBOUNCE_MS, step=_DEBOUNCE_MS,
            rust_timeout=_RECHECK_MS, yield_on_timeout=True, recursive=False, raise_interrupt=True,
        ):  # fmt: skip
            yield
    while not stop.wait(_RECHECK_MS / 1000):
        yield


def start_daemon_future(work: Callable[[], Value], name: str, exit_wait_seconds: float = 0.0) -> "Future[Value]":
    """Start `work` in a daemon thread. The interpreter would wait indefinitely for the threads of an executor.

    The exit of the process waits for the work for `exit_wait_seconds` at most.
    """
    done: Future[Value] = Future()
    calls = [work]
    del work
    done.set_running_or_notify_cancel()  # a cancelled caller stops waiting, but the work cannot be cancelled

    def run() -> None:
        try:
            # The call is released before its result is set: the process may exit then, and a thread that frees tensors
            # during the exit aborts it.
            done.set_result(calls.pop()())
        except BaseException as error:  # noqa: BLE001  `done.result` raises it
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    if exit_wait_seconds:
        threading.Thread(target=futures.wait, args=([done], exit_wait_seconds), name=f"{name}-end").start()
    return done


async def run_in_daemon_thread(work: Callable[..., Value], *args: Any) -> Value:
    """Call `work` without blocking the event loop. If it hangs, the caller can still be cancelled."""
    return await asyncio.wrap_future(start_daemon_future(partial(work, *args), getattr(work, "__name__", "work")))
