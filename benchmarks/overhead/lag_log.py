"""Records by how much the timers of a process fire late, for benchmarks of several processes."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_TICK_SECONDS = 0.02
_LINES = 25
"""Ticks between two writes: the times of half a second."""


async def record_lag(file: Path) -> None:
    """Append lines with the time (`time.monotonic`) of a tick, its delay, and the wait for a core in it, seconds."""
    with file.open("a") as log:
        waited, lines = _waited_seconds(), list[str]()
        try:
            while True:
                due = time.monotonic() + _TICK_SECONDS
                await asyncio.sleep(_TICK_SECONDS)
                now, before = time.monotonic(), waited
                waited = _waited_seconds()
                lines.append(f"{now:.6f} {max(0.0, now - due):.6f} {waited - before:.6f}\n")
                if len(lines) == _LINES:
                    log.writelines(lines)
                    log.flush()
                    lines = []
        finally:
            log.writelines(lines)


def _waited_seconds() -> float:
    """Seconds for which this thread was ready to run and other processes had the cores."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


@dataclass(frozen=True)
class Lag:
    """Delays of the timers of a process, milliseconds.

    Attributes:
        p99: 99th percentile.
        own_p99: the same without the time in which other processes had the cores.
        median: of all delays.
        maximum: of all delays.
        ticks: number of timers.
    """

    p99: float
    own_p99: float
    median: float
    maximum: float
    ticks: int


def read_lag(file: Path, begin: float, end: float) -> Lag:
    """Return the lag between two times (`time.monotonic`)."""
    lines = [line.split() for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    rows = np.array(lines, float)
    late, waited = rows[(rows[:, 0] >= begin) & (rows[:, 0] <= end), 1:].T * 1000
    p99, own = (float(np.percentile(each, 99)) for each in (late, np.maximum(0.0, late - waited)))
    return Lag(p99, own, float(np.median(late)), float(late.max()), len(late))
