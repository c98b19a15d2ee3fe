"""How metrics reach a service: the choice of a logger, and the thread that runs it (I7)."""

import importlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from loguru import logger
from numpy.typing import ArrayLike

from prime_rl.configs.loading.root_config import RootConfig
from prime_rl.configs.monitoring import MetricLoggerConfig, WandbConfig, WandbExtrasConfig
from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.monitors.figures import FigureHistory, check_plotly_installed
from prime_rl.monitors.loggers.logger_base import MetricLogger, finite_values


def start_logger(config: MetricLoggerConfig, role: str, directory: Path, whole: RootConfig | None) -> MetricLogger:
    """Start the logger of `config`.

    Args:
        role: role of the process: `trainer`, `orchestrator` or `eval`.
        directory: the run directory.
        whole: configuration of the process, shown with the run.

    Raises:
        ConfigError: the package is not installed, or the logger rejects its configuration.
        LoggerUnreachable: its service does not answer.
    """
    check_loggers_installed([config])
    module, _, name = config.logger.partition(":")  # imported here: wandb takes a second, and others are optional
    build = getattr(importlib.import_module(f"prime_rl.monitors.loggers.{module}"), name)
    started: MetricLogger = build(config, role, directory, whole)
    return started


def check_loggers_installed(configs: Sequence[MetricLoggerConfig]) -> None:
    """Raise ConfigError if the package of a logger or of its figures is not installed."""
    for config in configs:
        if isinstance(config, WandbConfig) and config.log_extras is not None and config.log_extras.figures:
            check_plotly_installed("wandb.log_extras.figures")
        if missing := [package for package in config.packages if find_spec(package) is None]:
            extra = config.packages[0]
            raise ConfigError(
                f"{extra}: the package {missing[0]} is not installed; add `--extra {extra}` to your `uv sync`, or "
                f"remove the block {extra}"
            )


MAX_PENDING = 256
"""Calls that wait for the thread; later ones are dropped and counted."""


class BackgroundLogger:
    """Runs a `MetricLogger` on a thread, so that a slow or failing service neither delays nor stops training.

    Its calls are queued. After its first error it is disabled with a warning, and what is lost is counted. Thread-safe.

    Args:
        interval: steps between two tables of samples or distributions.
        pass_threshold: reward from which a rollout solves its example, for the figure of pass@k.
    """

    def __init__(
        self, target: MetricLogger, config: MetricLoggerConfig, interval: int, pass_threshold: float = 1.0
    ) -> None:
        self._target, self._interval = target, interval
        self._extras, self._timeout_seconds = config.log_extras, config.timeout_seconds
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_PENDING)
        self._num_given, self._num_logged, self._num_dropped, self._failed = 0, 0, 0, False
        extras = config.log_extras
        self._figures = extras if isinstance(extras, WandbExtrasConfig) and extras.figures else None
        self._history, self._last_step = FigureHistory(pass_threshold), 0
        self._thread = threading.Thread(target=self._work, name=f"{target.name}-logger", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Log scalars, without those that are None."""
        values = {name: value for name, value in metrics.items() if value is not None}
        self._put(lambda: self._target.log(step, values))
        if self._figures is not None:
            self._put(lambda: self._add_to_figures(step, values))

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table with one row per rollout, every `log_extras.interval` steps."""
        if self._figures is not None:
            self._put(lambda: self._history.add_samples(step, rows))
        if self._extras is not None and self._extras.samples and step % self._interval == 0 and rows:
            self._put(lambda: self._target.log_samples(step, rows))

    def log_distributions(self, step: int, distributions: Mapping[str, ArrayLike]) -> None:
        """Log one histogram per name, every `log_extras.interval` steps."""
        if self._extras is not None and self._extras.distributions and step % self._interval == 0:
            self._put(lambda: self._target.log_distributions(step, finite_values(distributions)))

    def summarize(self, values: Mapping[str, float]) -> None:
        """Log values that describe the whole run."""
        self._put(lambda: self._target.summarize(values))

    def close(self) -> None:
        """Log what is queued and finish the run; return after `timeout_seconds` at the latest."""
        if self._failed:
            self._thread.join(self._timeout_seconds)  # it may not have said so yet
            self._report_loss()
            return
        if self._figures is not None:
            self._put(self._draw, block=True)
        self._put(self._target.close, block=True)
        self._put(None, block=True)
        self._thread.join(self._timeout_seconds)
        name = self._target.name
        if self._thread.is_alive():
            advice = "; `wandb sync` uploads the rest" if name == "W&B" else ""
            logger.warning("{} did not finish within {:g} s (timeout_seconds){}", name, self._timeout_seconds, advice)
        if self._num_dropped:
            logger.warning("{} was too slow: {} calls were dropped", name, self._num_dropped)
        if self._failed:
            self._report_loss()

    def _report_loss(self) -> None:
        lost, text = self._num_given - self._num_logged, "{} lacks {} of {} calls; metrics/*.jsonl has all values"
        if lost > 0:
            logger.warning(text, self._target.name, lost, self._num_given)

    def _add_to_figures(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics; before a due step, draw the figures of the earlier ones, whose samples are known."""
        assert self._figures is not None
        if step and step % self._figures.figure_interval == 0:
            self._draw()
        self._last_step = step
        self._history.add_metrics(step, metrics)

    def _draw(self) -> None:
        """Log the figures under viz/."""
        assert self._figures is not None
        figures = {f"viz/{name}": figure for name, figure in self._history.figures(self._figures.figures_3d).items()}
        if figures:
            self._target.log_figures(self._last_step, figures)

    def _put(self, call: Callable[[], None] | None, block: bool = False) -> None:
        self._num_given += not block
        if self._failed:
            return
        try:
            self._calls.put(call, block, self._timeout_seconds if block else None)
        except queue.Full:
            self._num_dropped += 1
            if self._num_dropped == 1:
                logger.warning("{} is too slow; values are dropped until it catches up", self._target.name)

    def _work(self) -> None:
        """Make the queued calls until `None`, or until one fails."""
        while (call := self._calls.get()) is not None:
            try:
                call()
                self._num_logged += 1
            except Exception as error:  # noqa: BLE001  training continues after any error of a logger
                self._failed = True
                summary = summarize_exception(error)
                logger.warning("{} logging failed and is now disabled: {}", self._target.name, summary)
                return
