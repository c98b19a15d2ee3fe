"""Metrics as columns, and their decimation."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.storage.paths import RunPaths
from prime_rl_page.run_data.metric_series import MetricFile, Series, decimate, decimated_series, efficiency, wait_share

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500)


@settings(max_examples=40)
@given(y=values, max_points=st.integers(4, 60))
def test_decimation_keeps_ends_and_extremes(y, max_points):
    y = np.array(y)
    chosen = decimate(np.arange(len(y), dtype=float), y, max_points)
    assert len(chosen) == len(y) if len(y) <= max_points else len(chosen) <= max_points
    assert (np.diff(chosen) > 0).all()
    assert {0, len(y) - 1} <= set(chosen.tolist())
    assert y[chosen].min() == y.min() and y[chosen].max() == y.max()


def write(tmp_path, process, rows):
    paths = RunPaths(tmp_path)
    paths.metrics_dir.mkdir(exist_ok=True)
    with paths.metrics(process).open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return paths


def test_metrics_of_a_rollback_replace_the_repeated_steps(tmp_path):
    paths = write(tmp_path, "trainer", [{"step": n, "loss": n} for n in range(5)])
    file = MetricFile(paths, "trainer")
    file.refresh()
    write(tmp_path, "trainer", [{"step": 2, "loss": 20}, {"step": 3, "loss": 30}])
    file.refresh()
    assert file.series["loss"].steps.tolist() == [0, 1, 2, 3]
    assert file.series["loss"].values.tolist() == [0, 1, 20, 30]


READ = {  # lines, and the steps of each series
    "evaluation lines keep their own steps": (
        [{"step": 0, "reward/mean": 0.1}, {"step": 1, "reward/mean": 0.2}, {"step": 0, "eval/a/reward/mean": 0.5}],
        {"reward/mean": [0, 1], "eval/a/reward/mean": [0]}),
    "null, text and huge values are left out": (
        [{"step": 0, "loss": None, "entropy": "x", "grad_norm": 10**400, "lr": True, "mismatch_kl": 0.5}, {"loss": 1}],
        {"mismatch_kl": [0]}),
    "deprecated names are shown once": (
        [{"step": 0, "time/weight_update": 1.0, "time/switch": 1.0, "dropped/error/a": 2, "error/a": 2}],
        {"time/weight_update": [0], "dropped/error/a": [0]}),
    "a deprecated name alone is kept": ([{"step": 0, "time/switch": 1.0}], {"time/switch": [0]}),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "steps"), READ.values(), ids=READ)
def test_metrics_file_gives_a_series_per_metric(rows, steps, tmp_path):
    file = MetricFile(write(tmp_path, "orchestrator", rows), "orchestrator")
    file.refresh()
    assert {name: series.steps.tolist() for name, series in file.series.items()} == steps


def test_metrics_replaced_file_discards_the_old_values(tmp_path):
    paths = write(tmp_path, "trainer", [{"step": 0, "loss": 1}, {"step": 1, "loss": 1}])
    file = MetricFile(paths, "trainer")
    file.refresh()
    paths.metrics("trainer").unlink()
    write(tmp_path, "trainer", [{"step": 0, "entropy": 2}])
    paths.metrics("trainer").rename(tmp_path / "kept")  # another inode, even if the file system reuses numbers
    write(tmp_path, "trainer", [{"step": 0, "entropy": 2}])
    file.refresh()
    assert set(file.series) == {"entropy"}


def series(pairs):
    made = Series()
    for step, value in pairs:
        made.append(step, math.nan, value)
    return made


def test_wait_share_and_efficiency_use_the_steps_of_both():
    trainer = wait_share(series([(0, 1), (1, 2), (2, 1)]), series([(1, 4), (2, 4)]))
    assert trainer.steps.tolist() == [1, 2] and trainer.values.tolist() == [0.5, 0.25]
    both = efficiency(trainer, series([(2, 0.1), (3, 0.0)]))
    assert both.steps.tolist() == [2] and both.values.tolist() == [0.9]


def test_decimated_series_unknown_time_is_null():
    made = series([(0, 1.23456789)])
    assert decimated_series(made, 10) == {"step": [0], "time": [None], "value": [1.23457]}


@settings(max_examples=40)
@given(y=values, max_points=st.integers(4, 60))
def test_decimated_series_means_are_those_of_all_values(y, max_points):
    """The page smooths them: between the extremes of a curve with rare spikes there is no average."""
    made = decimated_series(series(enumerate(y)), max_points)
    if len(made["value"]) == len(y):
        assert "mean" not in made
        return
    bounds = [math.floor(len(y) * i / ((max_points - 2) // 2)) for i in range((max_points - 2) // 2 + 1)]
    for step, mean in zip(made["step"], made["mean"], strict=True):
        begin, end = next((a, b) for a, b in itertools.pairwise(bounds) if a <= step < b)
        assert mean == pytest.approx(np.mean(y[begin:end]), rel=1e-5, abs=1e-5)
