"""Records how busy the workers of an environment are: one line of its timeline every few seconds."""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

from prime_rl.liveness.timeline_writer import TimelineWriter

INTERVAL_SECONDS = 5.0
PHASE = "rollouts"
"""Name of the lines."""


class WorkerTimeline:
    """Adds a phase per interval to `timeline`, with these keys in addition.

    busy: CPU seconds of the workers / (seconds of the interval * number of workers), at most 1.
    groups: groups that finished in the interval.
    rollouts: rollouts in flight at its end.
    """

    def __init__(self, timeline: TimelineWriter) -> None:
        """Start the first interval."""
        self.num_groups = 0
        """Groups that finished so far; the pool counts them."""
        self._timeline = timeline
        self._cpu_seconds: dict[int, float] = {}
        self._start, self._last_groups = time.time(), 0

    async def record(self, pids: Callable[[], Iterable[int]], in_flight: Callable[[], int]) -> None:
        """Add phases until cancelled. `pids` and `in_flight` return the present workers and rollouts."""
        self.measure(pids())
        while True:
            self._start, self._last_groups = time.time(), self.num_groups
            await asyncio.sleep(INTERVAL_SECONDS)
            self._add(pids(), in_flight())

    def close(self) -> None:
        """Write what is queued; blocks."""
        self._timeline.close()

    def measure(self, pids: Iterable[int]) -> float:
        """Return the CPU seconds of the processes since the last call; those that are new count from now on."""
        now, used = dict[int, float](), 0.0
        for pid in pids:
            with suppress(psutil.Error):
                now[pid] = sum(psutil.Process(pid).cpu_times()[:4])  # with children that have exited
                used += now[pid] - self._cpu_seconds.get(pid, now[pid])
        self._cpu_seconds = now
        return used

    def _add(self, pids: Iterable[int], in_flight: int) -> None:
        end, present = time.time(), list(pids)
        share = self.measure(present) / max(end - self._start, 1e-3) / max(len(present), 1)
        groups = self.num_groups - self._last_groups
        self._timeline.add(PHASE, self._start, end, busy=min(1.0, share), groups=groups, rollouts=in_flight)
