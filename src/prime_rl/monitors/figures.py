"""Figures as plotly's JSON, dicts of lists and numbers that need no plotly until W&B gets them, and the history of a
run that they show, at bounded memory.

A heatmap is the default; `three_d` draws a surface of the same numbers.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from prime_rl.core.errors import ConfigError
from prime_rl.core.pass_at_k import REWARD_TOLERANCE, pass_at_k

Figure = dict[str, Any]
"""`data` and `layout` of a plotly figure."""

_NUM_BINS = 40
_BAND_COLOURS = ("31,119,180", "255,127,14", "44,160,44", "214,39,40", "148,103,189", "140,86,75")
_NUM_RESAMPLES = 200
_MAX_EXAMPLES = 4096
"""Examples that are resampled; the band of more examples is scaled."""
_QUANTILES = (0.05, 0.95)


@dataclass(frozen=True, slots=True)
class PassAtK:
    """pass@k of groups of rollouts, with a bootstrap band over the examples.

    Attributes:
        k: the numbers of rollouts, ascending.
        mean: the unbiased estimate of pass@k for each k.
        low, high: 5 % and 95 % quantile of the estimate over resampled examples.
    """

    k: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def check_plotly_installed(key: str) -> None:
    """Raise ConfigError for the key that needs plotly if it is not installed."""
    if find_spec("plotly") is None:
        raise ConfigError(f"{key}: the package plotly is not installed; add `--extra plots` to your `uv sync`")


def distribution_over_steps(
    title: str, label: str, values: Mapping[int, Sequence[float]], three_d: bool = False
) -> Figure:
    """Draw the distribution of a value at each step, and its mean; columns are steps, rows are bins."""
    steps = [step for step, given in values.items() if len(given)]
    flat = [value for step in steps for value in values[step]]
    low, high = min(flat), max(flat)
    margin = 0.5 if low == high else 0.0
    edges = np.linspace(low - margin, high + margin, _NUM_BINS + 1).tolist()
    shares = [(np.histogram(values[step], bins=edges)[0] / len(values[step])).tolist() for step in steps]
    rows = [list(row) for row in zip(*shares, strict=True)]
    centers = [(a + b) / 2 for a, b in pairwise(edges)]
    figure = grid_figure(title, ("step", label, "share"), steps, centers, rows, three_d)
    if not three_d:
        means = [float(np.mean(values[step])) for step in steps]
        line = {"type": "scatter", "mode": "lines", "name": "mean", "line": {"color": "white", "width": 2}}
        figure["data"].append({**line, "x": steps, "y": means})
    return figure


def gradient_flow(norms: Mapping[int, Mapping[int, float]], three_d: bool = False) -> Figure:
    """Draw log10 of the gradient norm of each layer at each step; `norms` is step -> layer -> norm."""
    steps = list(norms)
    layers = sorted({layer for row in norms.values() for layer in row})
    rows = [[_log10(norms[step].get(layer)) for step in steps] for layer in layers]
    return grid_figure("Gradient flow", ("step", "layer", "log10 of the norm"), steps, layers, rows, three_d)


def pass_at_k_curve(counts: Sequence[tuple[int, int]], seed: int = 0) -> PassAtK:
    """Return the curve of examples with (rollouts, solved rollouts), at least one.

    k is 1, 2, 4, ... and the smallest number of rollouts of an example.
    """
    smallest = min(rollouts for rollouts, _ in counts)
    ks = sorted({*(2**power for power in range(smallest.bit_length())), smallest})
    table = np.array([[pass_at_k(rollouts, solved, k) for k in ks] for rollouts, solved in counts])
    random = np.random.default_rng(seed)
    size = min(len(counts), _MAX_EXAMPLES)
    drawn = table[random.choice(len(counts), size, replace=False)]
    shares = random.multinomial(size, np.full(size, 1 / size), _NUM_RESAMPLES) / size
    # The width of the band is that of all examples.
    deviations = (shares @ drawn - drawn.mean(axis=0)) * np.sqrt(size / len(counts))
    low, high = np.clip(table.mean(axis=0) + np.quantile(deviations, _QUANTILES, axis=0), 0, 1)
    return PassAtK(ks, table.mean(axis=0).tolist(), low.tolist(), high.tolist())


def pass_at_k_curves(curves: Mapping[str, PassAtK]) -> Figure:
    """Draw pass@k over k, one line per curve, each with its bootstrap band."""
    data: list[Figure] = []
    for index, (name, curve) in enumerate(curves.items()):
        colour = _BAND_COLOURS[index % len(_BAND_COLOURS)]
        band: Figure = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "x": curve.k, "hoverinfo": "skip"}
        band |= {"showlegend": False, "legendgroup": name}
        data.append({**band, "y": curve.low})
        data.append({**band, "y": curve.high, "fill": "tonexty", "fillcolor": f"rgba({colour},0.2)"})
        line = {"type": "scatter", "mode": "lines+markers", "name": name, "legendgroup": name}
        data.append({**line, "x": curve.k, "y": curve.mean, "line": {"color": f"rgb({colour})"}})
    axes = {"xaxis": {"title": {"text": "k"}, "type": "log"}, "yaxis": {"title": {"text": "pass@k"}, "range": [0, 1]}}
    return {"data": data, "layout": {"title": {"text": "pass@k"}, **axes}}


def grid_figure(
    title: str,
    labels: tuple[str, str, str],
    x: Sequence[float],
    y: Sequence[float],
    rows: Sequence[Sequence[float | None]],
    three_d: bool,
) -> Figure:
    """Draw a grid of values; `labels` name x, y and the value, `rows` has one row per y."""
    axes = {name: {"title": {"text": label}} for name, label in zip("xyz", labels, strict=True)}
    trace = {"x": x, "y": y, "z": rows, "colorscale": "Viridis", "colorbar": {"title": {"text": labels[2]}}}
    layout: Figure = {"title": {"text": title}}
    if three_d:
        return {
            "data": [{"type": "surface", **trace}],
            "layout": {**layout, "scene": {f"{name}axis": axis for name, axis in axes.items()}},
        }
    layout |= {f"{name}axis": axis for name, axis in axes.items() if name != "z"}
    return {"data": [{"type": "heatmap", **trace}], "layout": layout}


def _log10(value: float | None) -> float | None:
    return math.log10(value) if value is not None and value > 0 and math.isfinite(value) else None


MAX_STEPS = 400
"""Steps that are kept, at similar distances over the whole run."""
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
    """Append an entry; remove those of later steps, and if there are too many, one whose neighbours are closest."""
    for known in [known for known in entries if known >= step]:
        del entries[known]
    if len(entries) >= MAX_STEPS:
        steps = [*entries, step]
        distances = [after - before for before, after in zip(steps, steps[2:], strict=False)]
        del entries[steps[1 + distances.index(min(distances))]]
    entries[step] = entry


def _thin(values: Sequence[float]) -> list[float]:
    count = min(len(values), _MAX_VALUES)
    return [float(values[i * len(values) // count]) for i in range(count)] if count else []
