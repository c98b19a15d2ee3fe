"""Detects batches without a learning signal, from the lines of metrics/orchestrator.jsonl."""

from collections.abc import Mapping, Sequence
from typing import Any

from prime_rl.monitors.orchestrator_metric_table import ORCHESTRATOR

NUM_BATCHES = 3
"""Number of consecutive batches with all advantages 0 that cause a warning."""

_ZERO = "batch/zero_advantage_groups"


def find_missing_signal(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a warning with the probable cause if all advantages of the last `NUM_BATCHES` batches are 0.

    Args:
        rows: lines of `metrics/orchestrator.jsonl` in order; lines of evaluations are ignored.
    """
    batches = [row for row in rows if _ZERO in row][-NUM_BATCHES:]
    steps = [row["step"] for row in batches]
    if len(batches) < NUM_BATCHES or steps != list(range(steps[0], steps[0] + NUM_BATCHES)):
        return None
    if any(row[_ZERO] < 1 for row in batches):
        return None
    return f"all advantages of batches {steps[0]} to {steps[-1]} are 0, so the policy learns nothing: {_cause(batches)}"


class LearningSignalMonitor:
    """Warns once when the learning signal disappears."""

    def __init__(self) -> None:
        self._rows: list[Mapping[str, Any]] = []
        self._warned = False

    def add(self, row: Mapping[str, Any]) -> str | None:
        """Add the next line of the orchestrator's metrics; return a warning if one is due."""
        if _ZERO not in row:
            return None
        self._rows = [*self._rows[1 - NUM_BATCHES :], row]
        warning = find_missing_signal(self._rows)
        warned, self._warned = self._warned, warning is not None
        return None if warned else warning


def _cause(batches: Sequence[Mapping[str, Any]]) -> str:
    if all(row.get("batch/rollouts_per_group", 2) <= 1 for row in batches):
        return "a group of one rollout has no baseline; set orchestrator.rollouts_per_example to 2 or more"
    last = batches[-1]
    if all(row.get("reward/std") == 0 for row in batches) and len({row.get("reward/mean") for row in batches}) == 1:
        return (
            f"all rewards are {last['reward/mean']:.4g}; look at samples/step_{last['step']}.jsonl: the examples are "
            "too easy or too hard for the model, or the reward function returns a constant"
        )
    if all(ORCHESTRATOR.read(row, "batch/zero_advantage_filler", 0) > 0 for row in batches):
        return (
            "every group was dropped, so the batches are filled with groups without a gradient "
            "(batch/zero_advantage_filler); the examples are too easy or too hard for the model"
        )
    return (
        "rewards differ between examples but never within a group; the examples are too easy or too hard for the "
        "model, or its samples are identical (sampling.temperature)"
    )
