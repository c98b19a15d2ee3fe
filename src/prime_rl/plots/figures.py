"""Figures as plotly's JSON: dicts of lists and numbers, which need no plotly until W&B gets them.

A heatmap is the default; `three_d` draws a surface of the same numbers.
"""

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np

from prime_rl.core.errors import ConfigError
from prime_rl.plots.pass_at_k_curve import PassAtK

Figure = dict[str, Any]
"""`data` and `layout` of a plotly figure."""

_NUM_BINS = 40
_BAND_COLOURS = ("31,119,180", "255,127,14", "44,160,44", "214,39,40", "148,103,189", "140,86,75")


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
