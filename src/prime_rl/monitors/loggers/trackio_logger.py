"""trackio: the same values as W&B in a local database, shown by `trackio show`; figures are not supported."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import trackio
from numpy.typing import NDArray

from prime_rl.configs.loading.root_config import RootConfig
from prime_rl.configs.monitoring import TrackioConfig
from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.monitors.loggers.logger_base import MetricLogger, continues_earlier_run, table_of


class TrackioLogger(MetricLogger):
    """One trackio run, in the folder TRACKIO_DIR. A resumed process continues the run of the same name.

    Args:
        role: role of the process, the default name of the run.
        whole: configuration of the process, shown with the run.

    Raises:
        ConfigError: trackio rejects the settings, or its database cannot be written.
    """

    name = "trackio"

    def __init__(self, config: TrackioConfig, role: str, directory: Path, whole: RootConfig | None) -> None:
        try:
            self._run = trackio.init(
                project=config.project,
                name=config.name or role,
                group=config.group,
                config=whole.model_dump(mode="json") if whole else None,
                resume="allow" if continues_earlier_run(whole) else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except Exception as error:  # noqa: BLE001  trackio has no base class of its errors
            raise ConfigError(f"trackio: {summarize_exception(error)}") from None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log scalars."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table with one row per rollout."""
        columns, data = table_of(step, rows)
        self._run.log({"samples": trackio.Table(columns=columns, data=data)}, step=step)

    def log_distributions(self, step: int, distributions: Mapping[str, NDArray[np.float64]]) -> None:
        """Log one histogram per name."""
        histograms = {f"distributions/{name}": trackio.Histogram(values) for name, values in distributions.items()}
        self._run.log(histograms, step=step)

    def summarize(self, values: Mapping[str, float]) -> None:
        """Log the values in a line of their own: trackio has no summary."""
        self._run.log(dict(values))

    def close(self) -> None:
        """Write the remaining data and finish the run."""
        self._run.finish()
