"""Helpers of the metric loggers: values in a form that they accept, and whether a run continues an earlier one."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from prime_rl.loading.root_config import RootConfig
from prime_rl.storage.rollback import is_restart


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
    columns = ["step", *rows[0]]
    return columns, [[step, *(_cell(row.get(column)) for column in columns[1:])] for row in rows]


def _cell(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool)) or value is None else json.dumps(value)
