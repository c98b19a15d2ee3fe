"""Small things that asyncio lacks: a pause that can be cut short, and an end of tasks that is waited for."""

import asyncio
from contextlib import suppress
from typing import Any


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Return after `seconds`, or as soon as `stop` is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


async def end_tasks(*tasks: "asyncio.Future[Any] | None") -> None:
    """Cancel what is not done, and wait for its end."""
    running = [task for task in tasks if task is not None and not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
