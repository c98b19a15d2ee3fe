"""The interface of a metric logger, and how one is started."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from prime_rl.configs.shared.blocks import WandbConfig
from prime_rl.configs.shared.monitoring import MetricLoggerConfig, TensorBoardConfig, TrackioConfig
from prime_rl.core.errors import ConfigError
from prime_rl.loading.root_config import RootConfig
from prime_rl.plots.figures import Figure, check_plotly_installed


class MetricLogger(Protocol):
    """Passes the values of one process to a service or a file. Calls come from one thread and may raise anything."""

    name: str
    """Name in messages."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the scalars of a step."""

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table with one row per rollout."""

    def log_distributions(self, step: int, distributions: Mapping[str, NDArray[np.float64]]) -> None:
        """Log one histogram per name; the values are finite, at least one per name."""

    def log_figures(self, step: int, figures: Mapping[str, Figure]) -> None:
        """Log figures by name."""

    def summarize(self, values: Mapping[str, float]) -> None:
        """Log values that describe the whole run."""

    def close(self) -> None:
        """Write everything and finish the run."""


def start_logger(config: MetricLoggerConfig, role: str, directory: Path, whole: RootConfig | None) -> MetricLogger:
    """Start the logger of `config`.

    Args:
        role: role of the process: `trainer`, `orchestrator` or `eval`.
        directory: the run directory.
        whole: configuration of the process, shown with the run.

    Raises:
        ConfigError: the package is not installed, or the logger rejects its configuration.
    """
    check_loggers_installed([config])
    if isinstance(config, WandbConfig):
        from prime_rl.monitors.loggers.wandb_logger import WandbLogger  # importing wandb takes a second

        return WandbLogger(config, role, directory, whole)
    if isinstance(config, TrackioConfig):
        from prime_rl.monitors.loggers.trackio_logger import TrackioLogger

        return TrackioLogger(config, role, whole)
    from prime_rl.monitors.loggers.tensorboard_logger import TensorBoardLogger

    assert isinstance(config, TensorBoardConfig)
    return TensorBoardLogger(config, role, directory)


def check_loggers_installed(configs: Sequence[MetricLoggerConfig]) -> None:
    """Raise ConfigError if the package of a logger or of its figures is not installed."""
    extras = {TrackioConfig: "trackio", TensorBoardConfig: "tensorboard"}
    for config in configs:
        if isinstance(config, WandbConfig) and config.log_extras is not None and config.log_extras.figures:
            check_plotly_installed("wandb.log_extras.figures")
        if (extra := extras.get(type(config))) is not None and find_spec(extra) is None:
            raise ConfigError(
                f"{extra}: the package {extra} is not installed; add `--extra {extra}` to your `uv sync`, or remove "
                f"the block {extra}"
            )
