"""Logs the metrics of a process: JSON lines, and W&B, trackio, TensorBoard and MLflow if configured.

Imports neither torch nor vllm.
"""

import json
import math
import numbers
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from loguru import logger as log
from numpy.typing import ArrayLike

from prime_rl.configs.loading.root_config import RootConfig
from prime_rl.configs.monitoring import MetricLoggerConfig
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.core.os_errors import wrap_os_errors
from prime_rl.monitors.bench_report import benchmark_figures
from prime_rl.monitors.loggers.logger_base import LoggerUnreachable
from prime_rl.monitors.loggers.metric_logger import BackgroundLogger, start_logger
from prime_rl.monitors.metric_table import METRIC_TABLES
from prime_rl.storage.paths import RunPaths


class Monitor:
    """Metrics of one process. It always writes `metrics/<role>.jsonl`, and to the configured loggers. Thread-safe.

    Args:
        role: `trainer`, `orchestrator` or `eval`.
        loggers: configurations of those that are on.
        config: shown with the runs of the loggers, and recorded in the run directory.

    Raises:
        ConfigError: the file cannot be written, or a logger has no key or is not installed.
    """

    def __init__(
        self,
        paths: RunPaths,
        role: str,
        loggers: Sequence[MetricLoggerConfig] | None,
        config: RootConfig | None = None,
    ) -> None:
        path = self._path = paths.metrics(role)
        problem = f"output_dir: {path} cannot be written"
        with translate_error(OSError, lambda error: ConfigError(f"{problem}: {error.strerror}; set --output-dir")):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            if not (data := path.read_bytes()).endswith(b"\n"):  # the last line of a killed process is incomplete
                self._file.truncate(data.rfind(b"\n") + 1)
        if config is not None:
            config.record(paths)
        self._table = METRIC_TABLES[role]
        self._lock = threading.Lock()
        self._paths, self._is_benchmark = paths, getattr(config, "bench", False)
        threshold, self._loggers = getattr(config, "pass_threshold", 1.0), list[BackgroundLogger]()
        for logger in loggers or ():
            # `eval` logs each evaluation.
            interval = 1 if role == "eval" or logger.log_extras is None else logger.log_extras.interval
            try:
                target = start_logger(logger, role, paths.root, config)
            except LoggerUnreachable as error:  # a service that is down stops no training
                text = f"{error}; this {role} logs nothing there, {path} has all values"
                log.warning("{}", text)
                line = {"time": time.time(), "kind": "logger", "env": role, "count": 1, "text": text}
                with suppress(OSError), paths.warnings.open("a") as warnings:  # for the console, `doctor` and the page
                    warnings.write(json.dumps(line) + "\n")
                continue
            self._loggers.append(BackgroundLogger(target, logger, interval, threshold))

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Log the metrics of a step; None for a metric without a value.

        Raises:
            UndeclaredMetricError: see `MetricTable.add_deprecated`.
            SystemResourceError: the disk is full.
        """
        plain = {name: _plain(value) for name, value in self._table.add_deprecated(metrics).items()}
        line = (json.dumps({"step": step, "time": time.time(), **plain}, allow_nan=False) + "\n").encode()
        with self._lock, wrap_os_errors(f"write the metrics of step {step}", self._path):
            written = self._file.write(line)
            while written < len(line):  # a nearly full disk accepted a part; the next write raises the reason
                written += self._file.write(line[written:])
        for logger in self._loggers:
            logger.log(step, plain)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log rollouts as a table, every `log_extras.interval` steps, to the loggers that have tables."""
        for logger in self._loggers:
            logger.log_samples(step, rows)

    def log_distributions(self, step: int, distributions: Mapping[str, ArrayLike]) -> None:
        """Log distributions (name -> values of any shape) to the loggers, every `log_extras.interval` steps."""
        for logger in self._loggers:
            logger.log_distributions(step, distributions)

    def close(self) -> None:
        """Close the file and finish the runs of the loggers, which get the figures of a benchmark first."""
        self._file.close()
        if self._is_benchmark and self._loggers:
            found = benchmark_figures(self._paths, self._table.process)
            figures = {f"bench/{name}/{stat}": value for name, stats in found.items() for stat, value in stats.items()}
            for logger in self._loggers:
                logger.summarize(figures)
        for logger in self._loggers:
            logger.close()


def _plain(value: float | None) -> float | None:
    """Turn numpy scalars and bools into plain numbers, NaN and infinity into None: JSON has neither."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if isinstance(value, numbers.Integral) else float(value)
