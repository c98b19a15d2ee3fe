"""Waiting for an artifact to appear. Every wait has an owner and a deadline (I7).

A watcher is a hint and `stat` is the truth: network file systems send no events, so the path is checked again at
every event and at least four times a second. Where the kernel has no watcher left to give (its limits on inotify, or on
open files), that alone has to do.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

from watchfiles import awatch, watch
from watchfiles._rust_notify import WatchfilesRustInternalError

from prime_rl.errors import RunError

_RECHECK_MS = 250
_DEBOUNCE_MS = 5
_NO_WATCHER = (OSError, WatchfilesRustInternalError)


class DeadlineError(RunError):
    """What was waited for did not come in time; the message names it and who should have made it."""


def wait_for(
    path: Path,
    timeout_s: float,
    owner: str,
    check: Callable[[], None] = lambda: None,
    counts: Callable[[], bool] = lambda: True,
) -> None:
    """Block until `path` exists.

    Args:
        path: what to wait for; its parent is made if missing, so that it can be watched.
        timeout_s: seconds until the wait is given up.
        owner: who makes the path and where its log is, for the error.
        check: called again and again; raises what makes waiting pointless.
        counts: whether what exists is what is waited for; another may take its place.

    Raises:
        DeadlineError: `timeout_s` passed.
    """

    def holds() -> bool:
        return path.exists() and counts()

    wait_until(path.parent, holds, timeout_s, f"{path}, which {owner} should have written", check)


def wait_until(
    directory: Path,
    holds: Callable[[], bool],
    timeout_s: float,
    what: str,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Block until something holds of what is in `directory`, which is made if missing; otherwise as `wait_for`."""
    deadline = time.monotonic() + timeout_s
    directory.mkdir(parents=True, exist_ok=True)
    if holds():
        return
    for _ in _ticks(directory):
        if holds():
            return
        check()
        if time.monotonic() > deadline:
            raise DeadlineError(f"waited {timeout_s:.0f} s for {what}")


async def changes(directory: Path, stop: asyncio.Event) -> AsyncIterator[None]:
    """Yield whenever `directory` may have changed: at once, at each event, and four times a second."""
    directory.mkdir(parents=True, exist_ok=True)
    yield
    with suppress(*_NO_WATCHER):
        async for _ in awatch(
            directory, stop_event=stop, debounce=_DEBOUNCE_MS, step=_DEBOUNCE_MS, rust_timeout=_RECHECK_MS,
            yield_on_timeout=True, recursive=False,
        ):  # fmt: skip
            yield
    while not stop.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(_RECHECK_MS / 1000):
                await stop.wait()
        yield


def _ticks(directory: Path) -> Iterator[None]:
    """Yield at each event and four times a second."""
    with suppress(*_NO_WATCHER):
        for _ in watch(
            directory, stop_event=threading.Event(), debounce=_DEBOUNCE_MS, step=_DEBOUNCE_MS,
            rust_timeout=_RECHECK_MS, yield_on_timeout=True, recursive=False, raise_interrupt=True,
        ):  # fmt: skip
            yield
    pause = threading.Event()
    while True:
        pause.wait(_RECHECK_MS / 1000)
        yield
