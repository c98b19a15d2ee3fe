"""Metrics of a run as columns: one series of (step, time, value) per metric and process, and their decimation."""

import math
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from prime_rl.core.json_lines import JsonLinesFile
from prime_rl.monitors.metric_table import METRIC_TABLES, Metric
from prime_rl.storage.paths import RunPaths

PROCESSES = ("orchestrator", "trainer", "eval")
"""Processes that write metrics/<process>.jsonl."""
_NOT_METRICS = ("step", "time")
_LARGEST = 1e300
_MAX_SHAPES = 50
"""Lines of one process have few different sets of names."""


class Series:
    """The values of one metric in order of the steps. A rollback removes the steps that it repeats."""

    __slots__ = ("steps", "times", "values")

    def __init__(self) -> None:
        self.steps, self.times, self.values = array("d"), array("d"), array("d")

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, step: float, time: float, value: float) -> None:
        """Append a value; `time` is NaN if it is unknown."""
        steps = self.steps
        while steps and steps[-1] >= step:
            del steps[-1], self.times[-1], self.values[-1]
        steps.append(step)
        self.times.append(time)
        self.values.append(value)


class MetricFile:
    """The metrics of one process, read incrementally from metrics/<process>.jsonl."""

    def __init__(self, paths: RunPaths, process: str) -> None:
        self.process = process
        self.file = JsonLinesFile(paths.metrics(process))
        self.series: dict[str, Series] = {}
        self._old_names: dict[str, str | None] = {}
        self._kept: dict[tuple[str, ...], tuple[str, ...]] = {}

    def refresh(self) -> None:
        """Read the new lines. A replaced file discards the earlier values."""
        series = self.series
        for row in self.file.follow(series.clear):
            if is_number(step := row.get("step")):
                seconds = time if is_number(time := row.get("time")) else math.nan
                for name, value in self.select(row):
                    if (found := series.get(name)) is None:
                        found = series[name] = Series()
                    found.append(step, seconds, value)

    def select(self, row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        """Return the metrics of a line that have a value; deprecated aliases are left out."""
        names = tuple(row)
        if (kept := self._kept.get(names)) is None:
            repeated = {self._old_name(name) for name in names}
            kept = tuple(name for name in names if name not in _NOT_METRICS and name not in repeated)
            self._kept = {names: kept} if len(self._kept) > _MAX_SHAPES else {**self._kept, names: kept}
        for name in kept:
            if is_number(value := row[name]):
                yield name, value

    def _old_name(self, name: str) -> str | None:
        if name not in self._old_names:
            table = METRIC_TABLES.get(self.process)
            self._old_names[name] = table.old_name(name) if table is not None else None
        return self._old_names[name]


def describe_metric(process: str, name: str) -> Metric | None:
    """Unit and meaning of a metric; None if no table declares it."""
    table = METRIC_TABLES.get(process)
    return table.find(name) if table is not None else None


def decimate(x: NDArray[np.float64], y: NDArray[np.float64], max_points: int) -> NDArray[np.intp]:
    """Choose the indices of at most `max_points` points: first, last, and minimum and maximum of equal sections.

    A curve through the chosen points has the same extremes as the curve through all of them.

    Args:
        x: float64 [N], ascending.
        y: float64 [N], finite.
        max_points: at least 4.
    """
    count = len(x)
    if count <= max_points:
        return np.arange(count)
    starts = _section_starts(count, max_points)
    ends = np.append(starts[1:], count)
    chosen = {0, count - 1}
    for begin, end in zip(starts.tolist(), ends.tolist(), strict=True):
        part = y[begin:end]
        chosen.add(begin + int(part.argmin()))
        chosen.add(begin + int(part.argmax()))
    return np.array(sorted(chosen), dtype=np.intp)


def _section_starts(count: int, max_points: int) -> NDArray[np.intp]:
    return np.linspace(0, count, (max_points - 2) // 2, endpoint=False).astype(np.intp)


def wait_share(wait: Series, step_seconds: Series) -> Series:
    """The share of each step that was a wait, for the steps that both series contain."""
    steps, times, waits, totals = _common(wait, step_seconds)
    known = totals > 0
    shares = np.minimum(1.0, waits[known] / totals[known])
    return _as_series(steps[known], times[known], shares)


def efficiency(trainer: Series, orchestrator: Series) -> Series:
    """1 - the smaller of two wait shares per step: 1 if one side never waits, so that it sets the pace."""
    steps, times, first, second = _common(trainer, orchestrator)
    return _as_series(steps, times, 1 - np.minimum(first, second))


def _common(one: Series, other: Series) -> list[NDArray[np.float64]]:
    """Steps of both series, with the times and values of the first and the values of the second."""
    columns = one.steps, one.times, one.values, other.steps, other.values
    steps, times, values, other_steps, other_values = (np.array(column, dtype=np.float64) for column in columns)
    _, i, j = np.intersect1d(steps, other_steps, assume_unique=True, return_indices=True)
    return [steps[i], times[i], values[i], other_values[j]]


def _as_series(steps: NDArray[np.float64], times: NDArray[np.float64], values: NDArray[np.float64]) -> Series:
    series = Series()
    for column, data in ((series.steps, steps), (series.times, times), (series.values, values)):
        column.frombytes(data.tobytes())
    return series


def decimated_series(series: Series, max_points: int) -> dict[str, list[float | None]]:
    """A series for the page: `step`, `time` (None if unknown) and `value` of at most `max_points` points.

    If points were left out, `mean` is the mean of all values of the point's section: a moving average of the chosen
    points would be one of extremes.
    """
    steps, times, values = (
        np.array(column, dtype=np.float64) for column in (series.steps, series.times, series.values)
    )
    chosen = decimate(steps, values, max_points)
    columns = {"value": values[chosen]}
    if len(chosen) < len(values):
        starts = _section_starts(len(values), max_points)
        means = np.add.reduceat(values, starts) / np.diff(starts, append=len(values))
        columns["mean"] = means[np.searchsorted(starts, chosen, side="right") - 1]
    return {
        "step": steps[chosen].tolist(),
        "time": [round(time, 2) if math.isfinite(time) else None for time in times[chosen].tolist()],
        **{name: [float(f"{value:.6g}") for value in column.tolist()] for name, column in columns.items()},
    }


def is_number(value: object) -> TypeGuard[float]:
    """JSON has no subclasses of int and float besides bool, so the exact type is enough, and a third of the time."""
    return (type(value) is float or type(value) is int) and -_LARGEST < value < _LARGEST
