"""Figures of a run: their numbers, and the bounds of the history."""

import json

import numpy as np
import pytest

from prime_rl.core.errors import ConfigError
from prime_rl.monitors import figures as module
from prime_rl.monitors.figures import (
    MAX_STEPS,
    FigureHistory,
    distribution_over_steps,
    gradient_flow,
    pass_at_k_curve,
    pass_at_k_curves,
)


def test_distribution_over_steps_is_the_share_of_each_bin():
    figure = distribution_over_steps("Rewards", "reward", {3: [0.0, 0.0, 1.0, 1.0], 7: [1.0], 8: []})
    heatmap, mean = figure["data"]
    assert (heatmap["type"], heatmap["x"]) == ("heatmap", [3, 7])
    assert [row[0] for row in (heatmap["z"][0], heatmap["z"][-1])] == [0.5, 0.5]
    assert [row[1] for row in (heatmap["z"][0], heatmap["z"][-1])] == [0.0, 1.0]
    assert sum(row[0] for row in heatmap["z"]) == 1
    assert (mean["x"], mean["y"]) == ([3, 7], [0.5, 1.0])
    assert json.loads(json.dumps(figure)) == figure, "lists and plain numbers alone"
    (surface,) = distribution_over_steps("Rewards", "reward", {3: [0.5], 4: [0.5]}, three_d=True)["data"]
    assert surface["type"] == "surface" and len(surface["z"]) == len(surface["y"])
    of_one_kind = distribution_over_steps("Rewards", "reward", {0: [2.0, 2.0]})["data"][0]
    assert np.isfinite(of_one_kind["z"]).all() and np.isfinite(of_one_kind["y"]).all()


def test_gradient_flow_is_the_logarithm_by_layer_and_step():
    figure = gradient_flow({0: {0: 1.0, 1: 100.0}, 10: {1: 0.0}})
    (heatmap,) = figure["data"]
    assert (heatmap["x"], heatmap["y"]) == ([0, 10], [0, 1])
    assert heatmap["z"] == [[0.0, None], [2.0, None]]


def test_pass_at_k_curve_has_the_estimate_and_a_band_around_it():
    curve = pass_at_k_curve([(4, 4), (4, 0), (4, 1), (4, 1)])
    assert curve.k == [1, 2, 4]
    assert curve.mean == pytest.approx([(1 + 0 + 0.25 + 0.25) / 4, (1 + 0 + 0.5 + 0.5) / 4, 0.75])
    assert all(low < mean < high for low, mean, high in zip(curve.low, curve.mean, curve.high, strict=True))
    certain = pass_at_k_curve([(2, 2)] * 5)
    assert certain.low == certain.mean == certain.high == [1.0, 1.0]
    assert pass_at_k_curve([(6, 3)]).k == [1, 2, 4, 6]
    few, many = (pass_at_k_curve([(1, 0), (1, 1)] * (count // 2)) for count in (100, 10_000))
    assert (few.high[0] - few.low[0]) / (many.high[0] - many.low[0]) == pytest.approx(10, rel=0.35)
    traces = pass_at_k_curves({"early": pass_at_k_curve([(2, 1)]), "late": certain})["data"]
    assert [trace.get("name") for trace in traces] == [None, None, "early", None, None, "late"]
    assert traces[1]["fill"] == "tonexty"


def rows_of(step, groups=3):
    return [
        {"group_id": group, "env": "toy", "reward": float((group + rollout + step) % 2), "advantage": rollout - 0.5}
        for group in range(groups)
        for rollout in range(2)
    ]


def test_figure_history_is_bounded_and_forgets_rolled_back_steps():
    history = FigureHistory()
    for step in range(3 * MAX_STEPS):
        history.add_samples(step, rows_of(step))
        history.add_metrics(step, {"grad_norm/layer_0": 1.0, "grad_norm/mlp": 2.0, "loss": 1.0})
    found = history.figures()
    assert list(found) == ["reward_landscape", "advantage_distribution", "gradient_flow", "pass_at_k"]
    steps = found["reward_landscape"]["data"][0]["x"]
    assert len(steps) == MAX_STEPS and np.diff(steps).max() <= 2 * 3  # also of the beginning
    assert (steps[0], steps[-1]) == (0, 3 * MAX_STEPS - 1)
    history.add_samples(10, rows_of(10))
    steps = history.figures()["reward_landscape"]["data"][0]["x"]
    assert steps[-1] == 10 and max(steps) == 10
    assert FigureHistory().figures() == {}


def test_figure_history_draws_pass_at_k_for_each_third_of_the_run():
    history = FigureHistory(pass_threshold=0.7)
    for step in range(6):
        history.add_samples(step, [{"group_id": 0, "reward": 0.7 if step > 3 else 0.6}] * 2)
    lines = {trace["name"]: trace["y"] for trace in history.figures()["pass_at_k"]["data"] if "name" in trace}
    assert lines == {"steps 0 to 1": [0, 0], "steps 2 to 3": [0, 0], "steps 4 to 5": [1, 1]}


def test_plotly_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="wandb: the package plotly is not installed; add `--extra plots`"):
        module.check_plotly_installed("wandb")
