"""The figures of `prime_rl.plots` for the page, from the metrics and the index of rollouts that it has read."""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_rl.page.run_data.metric_series import Series
from prime_rl.plots.figure_history import MAX_STEPS, FigureHistory
from prime_rl.plots.figures import Figure
from prime_rl.plots.loss_surface import read_loss_surface
from prime_rl.storage.paths import RunPaths

_LAYER = re.compile(r"grad_norm/layer_\d+")


def run_figures(
    paths: RunPaths, settings: Mapping[str, Any], series: Mapping[str, Series], entries: NDArray[np.void]
) -> dict[str, Figure]:
    """Return the figures that the run allows, by name; of a long run, at most `MAX_STEPS` steps at equal distances.

    Args:
        settings: the contents of run.toml.
        series: metrics of the trainer.
        entries: the index of all rollouts, in order of the steps.
    """
    history = FigureHistory(pass_threshold(settings))
    for step, norms in _gradient_norms(series).items():
        history.add_metrics(step, norms)
    for step, rollouts in _by_step(entries).items():
        groups = defaultdict(list)
        for key, reward in zip(rollouts[["env", "group_id"]].tolist(), rollouts["reward"].tolist(), strict=True):
            groups[key].append(reward)
        advantages = rollouts["advantage"]
        known = advantages[np.isfinite(advantages)].tolist()
        history.add_rollouts(step, rollouts["reward"].tolist(), known, list(groups.values()))
    found = history.figures()
    if (surface := read_loss_surface(paths)) is not None:
        found["loss_surface"] = surface.figure()
    return found


def pass_threshold(settings: Mapping[str, Any]) -> float:
    """Return the reward from which a rollout of the run with this run.toml solves its example."""
    orchestrator = settings.get("orchestrator")
    value = orchestrator.get("pass_threshold") if isinstance(orchestrator, Mapping) else None
    return float(value) if isinstance(value, int | float) else 1.0


def _gradient_norms(series: Mapping[str, Series]) -> dict[int, dict[str, float]]:
    norms: dict[int, dict[str, float]] = {}
    for name, one in series.items():
        if _LAYER.fullmatch(name):
            for step, value in zip(one.steps, one.values, strict=True):
                norms.setdefault(int(step), {})[name] = value
    return {step: norms[step] for step in _evenly(sorted(norms))}


def _by_step(entries: NDArray[np.void]) -> dict[int, NDArray[np.void]]:
    """The rollouts with a reward of each chosen step."""
    entries = entries[np.isfinite(entries["reward"])]
    steps, starts = np.unique(entries["step"], return_index=True)
    ends = np.append(starts[1:], len(entries))
    chosen = set(_evenly(steps.tolist()))
    return {
        int(step): entries[start:end] for step, start, end in zip(steps, starts, ends, strict=True) if step in chosen
    }


def _evenly(steps: list[int]) -> list[int]:
    count = min(len(steps), MAX_STEPS)
    return [steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)]
