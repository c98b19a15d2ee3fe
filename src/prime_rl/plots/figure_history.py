"""What the figures of a run need from each step, at bounded memory."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from prime_rl.core.pass_at_k import REWARD_TOLERANCE
from prime_rl.plots.figures import Figure, distribution_over_steps, gradient_flow, pass_at_k_curves
from prime_rl.plots.pass_at_k_curve import PassAtK, pass_at_k_curve

MAX_STEPS = 400
"""Steps that are kept; when there are more, every second one is dropped."""
_MAX_VALUES = 512
"""Values of a step that are kept, at equal distances."""
_NUM_CURVES = 3

T = TypeVar("T")
_LAYER = re.compile(r"grad_norm/layer_(\d+)")


@dataclass(frozen=True, slots=True)
class _Rollouts:
    rewards: list[float]
    advantages: list[float]
    counts: list[tuple[int, int]]  # rollouts and solved rollouts of each group


class FigureHistory:
    """Collects rollouts and metrics by step. A step that is given again, after a rollback, removes all later ones.

    Args:
        pass_threshold: reward from which a rollout solves its example.
    """

    def __init__(self, pass_threshold: float = 1.0) -> None:
        self._threshold = pass_threshold
        self._rollouts: dict[int, _Rollouts] = {}
        self._norms: dict[int, dict[int, float]] = {}

    def add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the gradient norms of layers, if the metrics contain any."""
        found = {int(match[1]): value for name, value in metrics.items() if (match := _LAYER.fullmatch(name))}
        if norms := {layer: float(value) for layer, value in found.items() if value is not None}:
            _add(self._norms, step, norms)

    def add_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rollouts: rows with `reward`, and optionally `advantage` and `group_id` (or `env` and `example`)."""
        groups: dict[Any, list[float]] = defaultdict(list)
        for row in rows:
            if (key := row.get("group_id", row.get("example"))) is not None:
                groups[row.get("env"), key].append(float(row["reward"]))
        advantages = [float(row["advantage"]) for row in rows if row.get("advantage") is not None]
        self.add_rollouts(step, [float(row["reward"]) for row in rows], advantages, list(groups.values()))

    def add_rollouts(
        self, step: int, rewards: Sequence[float], advantages: Sequence[float], groups: Sequence[Sequence[float]] = ()
    ) -> None:
        """Add the rewards and advantages of a step, and the rewards of each group; nothing without rewards."""
        least = self._threshold - REWARD_TOLERANCE
        counts = [(len(group), sum(reward >= least for reward in group)) for group in groups]
        if len(rewards):
            _add(self._rollouts, step, _Rollouts(_thin(rewards), _thin(advantages), counts[:_MAX_VALUES]))

    def figures(self, three_d: bool = False) -> dict[str, Figure]:
        """Return the figures that the collected steps allow, by name."""
        found: dict[str, Figure] = {}
        rewards = {step: entry.rewards for step, entry in self._rollouts.items()}
        if rewards:
            found["reward_landscape"] = distribution_over_steps("Reward landscape", "reward", rewards, three_d)
        advantages = {step: entry.advantages for step, entry in self._rollouts.items() if entry.advantages}
        if advantages:
            name = "Advantage distribution"
            found["advantage_distribution"] = distribution_over_steps(name, "advantage", advantages, three_d)
        if self._norms:
            found["gradient_flow"] = gradient_flow(self._norms, three_d)
        if curves := self._pass_at_k():
            found["pass_at_k"] = pass_at_k_curves(curves)
        return found

    def _pass_at_k(self) -> dict[str, PassAtK]:
        """Return one curve for each third of the run: the groups of one step are few."""
        steps = [step for step, entry in self._rollouts.items() if entry.counts]
        cuts = [len(steps) * i // _NUM_CURVES for i in range(_NUM_CURVES + 1)]
        curves = {}
        for part in filter(None, (steps[start:end] for start, end in pairwise(cuts))):
            name = f"step {part[0]}" if len(part) == 1 else f"steps {part[0]} to {part[-1]}"
            curves[name] = pass_at_k_curve([count for step in part for count in self._rollouts[step].counts])
        return curves


def _add(entries: dict[int, T], step: int, entry: T) -> None:
    """Append an entry; remove those of later steps, and every second one if there are too many."""
    for known in [known for known in entries if known >= step]:
        del entries[known]
    if len(entries) >= MAX_STEPS:
        for known in list(entries)[1::2]:
            del entries[known]
    entries[step] = entry


def _thin(values: Sequence[float]) -> list[float]:
    count = min(len(values), _MAX_VALUES)
    return [float(values[i * len(values) // count]) for i in range(count)] if count else []
