"""Detects blocking functions that run in the event loop instead of a thread."""

import asyncio
import functools


def needs_loop(function, loop):
    """Wrap `function` so that it fails if it is called in the thread of `loop`: it first waits for the loop."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(timeout=60)
        return function(*args, **kwargs)

    return run
