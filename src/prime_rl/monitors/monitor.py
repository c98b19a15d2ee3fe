"""Logs the metrics of a process: JSON lines, and W&B, trackio and TensorBoard if configured."""

import json
import math
import numbers
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import ArrayLike

from prime_rl.configs.shared.monitoring import MetricLoggerConfig
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.core.os_errors import wrap_os_errors
from prime_rl.loading.root_config import RootConfig
from prime_rl.monitors.bench_figures import benchmark_figures
from prime_rl.monitors.evaluation_metric_table import EVALUATION
from prime_rl.monitors.loggers.background_logger import BackgroundLogger
from prime_rl.monitors.loggers.metric_logger import start_logger
from prime_rl.monitors.orchestrator_metric_table import ORCHESTRATOR
from prime_rl.monitors.trainer_metric_table import TRAINER
from prime_rl.storage.paths import RunPaths

METRIC_TABLES = {table.process: table for table in (TRAINER, ORCHESTRATOR, EVALUATION)}


class Monitor:
    """Metrics of one process. It always writes `metrics/<role>.jsonl`, and to the configured loggers. Thread-safe.

    Args:
        role: `trainer`, `orchestrator` or `eval`.
        loggers: configurations of W&B, trackio and TensorBoard, if on.
        config: shown with the runs of the loggers.

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
        self._table = METRIC_TABLES[role]
        self._lock = threading.Lock()
        self._paths, self._is_benchmark = paths, getattr(config, "bench", False)
        threshold = getattr(config, "pass_threshold", 1.0)
        self._loggers = [
            BackgroundLogger(
                start_logger(logger, role, paths.root, config), logger, _table_interval(logger, role), threshold
            )
            for logger in loggers or ()
        ]

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


def _table_interval(config: MetricLoggerConfig, role: str) -> int:
    """Return the steps between two tables; `eval` logs each evaluation."""
    return 1 if role == "eval" or config.log_extras is None else config.log_extras.interval


def _plain(value: float | None) -> float | None:
    """Turn numpy scalars and bools into plain numbers, NaN and infinity into None: JSON has neither."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if isinstance(value, numbers.Integral) else float(value)
