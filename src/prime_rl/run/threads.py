"""I7: work that a hanging disk or network may never let end, in threads that not even the process waits for."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Value = TypeVar("Value")


def start(work: Callable[[], Value], name: str) -> "Future[Value]":
    """Do `work` in a thread of its own; the future has what it returns or raises.

    Those of an executor would be waited for at the end of the process.
    """
    done: Future[Value] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again by whoever asks for the result
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
