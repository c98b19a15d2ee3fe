"""Runs work that a hanging disk or network may block, in threads that do not prevent the process from exiting (I7)."""

import asyncio
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

Value = TypeVar("Value")


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
