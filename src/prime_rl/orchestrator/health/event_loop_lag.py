"""Measures the lag of the event loop."""

import asyncio

import numpy as np

_TICK_S = 0.05


class EventLoopLag:
    """Measures by how much a timer of 50 ms fires late."""

    def __init__(self) -> None:
        self._late: list[float] = []

    async def measure(self, stop: asyncio.Event) -> None:
        """Measure until `stop` is set."""
        loop = asyncio.get_running_loop()
        while not stop.is_set():
            due = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._late.append(max(0.0, loop.time() - due))

    def metrics(self) -> dict[str, float]:
        """Return median, 99th percentile and maximum since the last call, seconds; empty without a measurement."""
        late, self._late = np.array(self._late), []
        if not len(late):
            return {}
        return {
            "event_loop_lag/median": float(np.median(late)),
            "event_loop_lag/p99": float(np.percentile(late, 99)),
            "event_loop_lag/max": float(late.max()),
        }
