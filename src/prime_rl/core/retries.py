"""Retries of one operation, with a pause before each."""

import asyncio
from collections.abc import Iterable


class Retries:
    """The retries that are left.

    retries = Retries(growing_pauses(0.5, num_retries))
    while True:
        try:
            return await operation()
        except Failed as failure:
            if failure.is_final or not await retries.pause():
                raise
    """

    def __init__(self, pauses: Iterable[float]) -> None:
        """Allow one retry after each of the pauses, in seconds."""
        self._pauses = list(reversed([*pauses]))

    @property
    def left(self) -> int:
        """Number of further retries."""
        return len(self._pauses)

    async def pause(self, wanted: float | None = None) -> bool:
        """Sleep before the next retry, for the `wanted` seconds if given; return False, at once, if none is left."""
        if not self._pauses:
            return False
        planned = self._pauses.pop()
        await asyncio.sleep(planned if wanted is None else wanted)
        return True


def growing_pauses(first: float, count: int, factor: float = 4.0) -> list[float]:
    """Return so many pauses in seconds, each `factor` times as long as the one before."""
    return [first * factor**number for number in range(count)]
