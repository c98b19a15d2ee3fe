"""What the metric loggers share: their base class, values in a form that they accept, and whether a run continues."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from prime_rl.configs.loading.root_config import RootConfig
from prime_rl.monitors.figures import Figure
from prime_rl.storage.rollback import is_restart


class LoggerUnreachable(Exception):
    """The service of a logger does not answer at the start."""


class MetricLogger:
    """Passes the values of one process to a service or a file. Calls come from one thread and may raise anything.

    What a service does not have is ignored.
    """

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


def continues_earlier_run(config: RootConfig | None) -> bool:
    """Whether the process resumes from a checkpoint, or is restarted."""
    ckpt = getattr(config, "ckpt", None)
    resumes = ckpt is not None and ckpt.resume_step is not None
    return resumes or getattr(config, "restart", False) or is_restart()


def finite_values(distributions: Mapping[str, ArrayLike]) -> dict[str, NDArray[np.float64]]:
    """Return the finite values of each distribution that has any."""
    arrays = {name: np.asarray(values, dtype=np.float64).ravel() for name, values in distributions.items()}
    finite = {name: values[np.isfinite(values)] for name, values in arrays.items()}
    return {name: values for name, values in finite.items() if values.size}


def table_of(step: int, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows of a table of samples; values that are no scalars become JSON."""
    values = [[row.get(column) for column in rows[0]] for row in rows]
    plain = (str, int, float, type(None))
    cells = [[one if isinstance(one, plain) else json.dumps(one) for one in row] for row in values]
    return ["step", *rows[0]], [[step, *row] for row in cells]
