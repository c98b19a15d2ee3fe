"""Detects batches without a learning signal, from the lines of metrics/orchestrator.jsonl."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prime_rl.monitors.metric_table import ORCHESTRATOR

NUM_BATCHES = 3
"""Number of consecutive batches with all advantages 0 that cause a warning."""

NUM_ENVIRONMENT_BATCHES = 5
"""The same for one environment of a mixture."""

MIN_UNCOMPARED = 0.1
"""Share of tokens without a counterpart that causes a warning."""

_ZERO = "batch/zero_advantage_groups"
_UNCOMPARED = "batch/uncompared_tokens"
_ENV_ZERO = re.compile(r"env/(.+)/zero_advantage_groups")


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
    """Warns once when the learning signal disappears, of the whole batch or of one environment of a mixture."""

    def __init__(self) -> None:
        self._rows: list[Mapping[str, Any]] = []
        self._warned = self._warned_uncompared = False
        self._without: dict[str, _WithoutSignal] = {}

    def add(self, row: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        """Add the next line of the orchestrator's metrics; a line of an evaluation is ignored.

        Returns:
            The due warnings: kind (`signal` or `credit`), environment or "" for all, and text.
        """
        if _ZERO not in row:
            return []
        self._rows = [*self._rows[1 - NUM_BATCHES :], row]
        warning = find_missing_signal(self._rows)
        warned, self._warned = self._warned, warning is not None
        warnings = [("signal", "", warning)] if warning is not None and not warned else []
        share = row.get(_UNCOMPARED, 0)
        if share >= MIN_UNCOMPARED and not self._warned_uncompared:
            self._warned_uncompared = True
            text = (
                f"{share:.0%} of the tokens of batch {row['step']} are of turns or agents that no other rollout of "
                f"their group has, so their advantage is 0 ({_UNCOMPARED}): late turns learn nothing; raise "
                "rollouts_per_example, credit the whole rollout (step_rewards = ignore), or set advantages"
            )
            warnings.append(("credit", "", text))
        return warnings + list(self._add_environments(row))

    def _add_environments(self, row: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
        for key, share in row.items():
            if (found := _ENV_ZERO.fullmatch(key)) is None or row.get(f"env/{found[1]}/batch_share", 1) >= 1:
                continue
            env = found[1]
            if share < 1:
                self._without.pop(env, None)
                continue
            without = self._without.setdefault(env, _WithoutSignal())
            without.batches += 1
            without.groups += int(row.get(f"env/{env}/groups", 0))
            if without.batches == NUM_ENVIRONMENT_BATCHES:
                reward = row.get(f"reward/{env}/mean", math.nan)
                yield (
                    "signal",
                    env,
                    (
                        f"environment {env}: all advantages of its {without.groups} groups in {without.batches} "
                        f"batches are 0 (mean reward {reward:.3g}), so nothing is learned from it; "
                        "buffer.online_difficulty_filtering drops groups that are solved by all or by none of their "
                        "rollouts, filter_zero_advantage drops all such groups; or change its examples or its weight"
                    ),
                )


@dataclass(slots=True)
class _WithoutSignal:
    batches: int = 0
    groups: int = 0


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
