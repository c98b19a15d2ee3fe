"""Spreads work over turns of the event loop, so that timers and other connections do not wait for a burst."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class LoopTurns:
    """Sets the results of futures in order, a limited number in each turn of the running event loop."""

    def __init__(self, per_turn: int) -> None:
        """Set at most `per_turn` results in each turn."""
        self._per_turn = per_turn
        self._waiting: deque[Callable[[], None]] = deque()

    def resolve(self, future: "asyncio.Future[_T]", result: _T) -> None:
        """Set the result of a future, in this turn or a later one; nothing if it is done by then."""

        def set_result() -> None:
            if not future.done():
                future.set_result(result)

        self._waiting.append(set_result)
        if len(self._waiting) == 1:
            future.get_loop().call_soon(self._run, future.get_loop())

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(self._per_turn, len(self._waiting))):
            self._waiting[0]()  # it stays in the queue meanwhile, so that `resolve` does not schedule another call
            self._waiting.popleft()
        if self._waiting:
            loop.call_soon(self._run, loop)
