"""I7: work that a hanging disk or network may never let end, in threads that the process does not wait for in vain."""

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

Value = TypeVar("Value")


def start(work: Callable[[], Value], name: str, stay_s: float = 0.0) -> "Future[Value]":
    """Do `work` in a thread of its own; those of an executor would be waited for, however long it takes.

    Args:
        work: what to do.
        name: of the thread.
        stay_s: the process does not end before the work is done, but for so many seconds at most.

    Returns:
        What the work will return or raise.
    """
    done: Future[Value] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again by whoever asks for the result
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    if stay_s:
        threading.Thread(target=futures.wait, args=([done], stay_s), name=f"{name}-end").start()
    return done
