"""Helpers for asyncio: an interruptible pause, blocks that others can end, and cancellation that waits for the end."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Return after `seconds`, or as soon as `stop` is set. (`asyncio.wait_for` may swallow a cancellation in 3.11.)"""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


@asynccontextmanager
async def deadline_scope(
    error: Callable[[], Exception], seconds: float | None = None
) -> AsyncIterator[asyncio.Timeout]:
    """Raise `error()` from the block at the deadline of the yielded timeout, which others may reschedule."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield scope
    except TimeoutError:
        if not scope.expired():
            raise
        raise error() from None


async def end_tasks(*tasks: "asyncio.Future[Any] | None") -> None:
    """Cancel the tasks that are not done, and wait for them."""
    running = [task for task in tasks if task is not None and not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
