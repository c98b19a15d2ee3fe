"""Declared metrics: name, unit and meaning of everything that a process writes to metrics/*.jsonl."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loguru import logger

STRICT_VARIABLE = "PRIME_RL_STRICT_METRICS"
"""Environment variable: 1 makes an undeclared metric an error. The test suite sets it."""

_PLACEHOLDER = re.compile(r"<\w+>")


class UndeclaredMetricError(Exception):
    """A process logged a metric that its table does not declare."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or a family of metrics.

    Attributes:
        name: `area/name` or `area/name/stat`. A placeholder such as `<env>` stands for any text.
        unit: "" for a number without a unit.
        meaning: description for the reference page.
        deprecated: former name with the same placeholders; it is written as well for one release.
    """

    name: str
    unit: str
    meaning: str
    deprecated: str | None = None


class MetricTable:
    """The metrics of `process`, which is also the name of its file. The first matching declaration counts."""

    def __init__(self, process: str, metrics: Sequence[Metric]) -> None:
        self.process, self.metrics = process, tuple(metrics)
        self._patterns = [(_pattern(metric.name), metric) for metric in metrics]
        self._old_names: dict[str, str | None] = {}

    def find(self, name: str) -> Metric | None:
        """The declaration of a metric; None if there is none."""
        return next((metric for pattern, metric in self._patterns if pattern.fullmatch(name)), None)

    def old_name(self, name: str) -> str | None:
        """The deprecated name of a metric, its placeholders filled in; None if it has none."""
        metric = self.find(name)
        if metric is None or metric.deprecated is None:
            return None
        values = iter(_pattern(metric.name).fullmatch(name).groups())  # type: ignore[union-attr]
        return _PLACEHOLDER.sub(lambda _: next(values), metric.deprecated)

    def add_deprecated(self, metrics: Mapping[str, float | None]) -> dict[str, float | None]:
        """Check that all metrics are declared, and add those with a deprecated name under that name too.

        Raises:
            UndeclaredMetricError: a metric is not declared, and `PRIME_RL_STRICT_METRICS` is 1. Otherwise a warning is
                logged once per name.
        """
        complete = dict(metrics)
        for name, value in metrics.items():
            if name not in self._old_names:
                if self.find(name) is None:
                    where = "prime_rl/monitors/*_metric_table.py"
                    text = f"metric {name!r} of {self.process} is not declared; add it to {where}"
                    if os.environ.get(STRICT_VARIABLE) == "1":
                        raise UndeclaredMetricError(text)
                    logger.warning(text)
                self._old_names[name] = self.old_name(name)
            if (old := self._old_names[name]) is not None:
                complete[old] = value
        return complete

    def read(self, row: Mapping[str, Any], name: str, default: Any = None) -> Any:
        """Read a metric from a line of the process's file; also from a run that wrote its deprecated name."""
        return row.get(name, row.get(self.old_name(name) or name, default))


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("(.+)".join(map(re.escape, _PLACEHOLDER.split(name))))
