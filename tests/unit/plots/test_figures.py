"""Figures of a run: their numbers, bounds of the history, and the file of the loss surface."""

import json

import numpy as np
import pytest

from prime_rl.core.errors import ConfigError
from prime_rl.entrypoints.loss_surface import _main
from prime_rl.plots import figures as module
from prime_rl.plots.figure_history import MAX_STEPS, FigureHistory
from prime_rl.plots.figures import distribution_over_steps, gradient_flow, pass_at_k_curves
from prime_rl.plots.loss_surface import LossSurface, read_loss_surface, write_loss_surface
from prime_rl.plots.pass_at_k_curve import pass_at_k_curve
from prime_rl.storage.paths import RunPaths
from prime_rl.trainer.rl import loss_surface as measured


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


def test_gradient_flow_is_the_logarithm_by_layer_and_step():
    figure = gradient_flow({0: {0: 1.0, 1: 100.0}, 10: {1: 0.0}})
    (heatmap,) = figure["data"]
    assert (heatmap["x"], heatmap["y"]) == ([0, 10], [0, 1])
    assert heatmap["z"] == [[0.0, None], [2.0, None]]


def test_pass_at_k_curve_has_the_estimate_and_a_band_around_it():
    counts = [(4, 4), (4, 0), (4, 1), (4, 1)]
    curve = pass_at_k_curve(counts)
    assert curve.k == [1, 2, 4]
    assert curve.mean == pytest.approx([(1 + 0 + 0.25 + 0.25) / 4, (1 + 0 + 0.5 + 0.5) / 4, 0.75])
    assert all(low < mean < high for low, mean, high in zip(curve.low, curve.mean, curve.high, strict=True))
    certain = pass_at_k_curve([(2, 2)] * 5)
    assert certain.low == certain.mean == certain.high == [1.0, 1.0]
    assert pass_at_k_curve([(6, 3)]).k == [1, 2, 4, 6]


def test_pass_at_k_band_narrows_with_the_square_root_of_the_examples():
    def width(count):
        curve = pass_at_k_curve([(1, 0), (1, 1)] * (count // 2))
        return curve.high[0] - curve.low[0]

    assert width(100) / width(10_000) == pytest.approx(10, rel=0.35)


def test_pass_at_k_figure_has_a_line_and_a_band_per_curve():
    figure = pass_at_k_curves({"early": pass_at_k_curve([(2, 1)]), "late": pass_at_k_curve([(2, 2)])})
    assert [trace.get("name") for trace in figure["data"]] == [None, None, "early", None, None, "late"]
    assert figure["data"][1]["fill"] == "tonexty"


def test_loss_surface_is_kept_and_shows_the_path_of_the_versions(tmp_path):
    paths = RunPaths(tmp_path)
    assert read_loss_surface(paths) is None
    surface = LossSurface([0, 1], [0, 1], [[1.0, 2.0], [3.0, 4.0]], [(1, 0.5, 0.5), (2, 1.0, 0.0)])
    write_loss_surface(paths, surface)
    contour, path = read_loss_surface(paths).figure()["data"]
    assert (contour["type"], contour["z"]) == ("contour", [[1.0, 2.0], [3.0, 4.0]])
    assert (path["x"], path["y"], path["text"]) == ([0.5, 1.0], [0.5, 0.0], ["v1", "v2"])
    for damaged in ('{"x": [0]', '{"x": [0, 1], "y": [0], "losses": [[1]], "path": []}'):
        paths.loss_surface.write_text(damaged)
        assert read_loss_surface(paths) is None


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
    assert MAX_STEPS // 2 <= len(steps) <= MAX_STEPS
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


def test_loss_surface_command_writes_the_file_of_the_page(tmp_path, monkeypatch, capsys):
    asked = []
    surface = LossSurface([0, 1], [0, 1], [[1.0, 2.0], [3.0, 4.0]], [(1, 0.5, 0.5)])
    monkeypatch.setattr(measured, "measure_loss_surface", lambda paths, batch: asked.append(batch) or surface)
    _main([str(tmp_path), "--batch", "3"])
    assert asked == [3] and read_loss_surface(RunPaths(tmp_path)) == surface
    assert f"`uv run page {tmp_path}` shows it" in capsys.readouterr().out


def test_loss_surface_command_without_a_run_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer.toml does not exist; the loss surface needs"):
        _main([str(tmp_path)])


def test_plotly_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="wandb: the package plotly is not installed; add `--extra plots`"):
        module.check_plotly_installed("wandb")


def test_figures_are_finite_for_values_of_one_kind():
    figure = distribution_over_steps("Rewards", "reward", {0: [2.0, 2.0]})
    assert np.isfinite(figure["data"][0]["z"]).all() and np.isfinite(figure["data"][0]["y"]).all()
