"""Metrics as columns, and their decimation."""

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.page.run_data.metric_series import MetricFile, Series, decimate, decimated_series, efficiency, wait_share
from prime_rl.storage.paths import RunPaths

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500)


@given(y=values, max_points=st.integers(4, 60))
def test_decimation_keeps_ends_and_extremes(y, max_points):
    y = np.array(y)
    chosen = decimate(np.arange(len(y), dtype=float), y, max_points)
    assert len(chosen) <= max(max_points, 4) and (np.diff(chosen) > 0).all()
    assert {0, len(y) - 1} <= set(chosen.tolist())
    assert y[chosen].min() == y.min() and y[chosen].max() == y.max()


@given(y=values)
def test_decimation_few_points_keeps_all(y):
    assert len(decimate(np.arange(len(y), dtype=float), np.array(y), len(y) + 4)) == len(y)


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
    assert file.refresh() is False
    assert file.series["loss"].steps.tolist() == [0, 1, 2, 3]
    assert file.series["loss"].values.tolist() == [0, 1, 20, 30]


def test_metrics_evaluation_lines_keep_their_own_steps(tmp_path):
    rows = [{"step": 0, "reward/mean": 0.1}, {"step": 1, "reward/mean": 0.2}, {"step": 0, "eval/a/reward/mean": 0.5}]
    file = MetricFile(write(tmp_path, "orchestrator", rows), "orchestrator")
    file.refresh()
    assert file.series["reward/mean"].steps.tolist() == [0, 1]
    assert file.series["eval/a/reward/mean"].steps.tolist() == [0]


def test_metrics_null_text_and_huge_values_are_left_out(tmp_path):
    rows = [
        {"step": 0, "loss": None, "entropy": "x", "grad_norm": 10**400, "lr": True, "mismatch_kl": 0.5},
        {"loss": 1},
    ]
    file = MetricFile(write(tmp_path, "trainer", rows), "trainer")
    file.refresh()
    assert list(file.series) == ["mismatch_kl"]


def test_metrics_deprecated_names_are_shown_once(tmp_path):
    rows = [{"step": 0, "time/weight_update": 1.0, "time/switch": 1.0, "dropped/error/a": 2, "error/a": 2}]
    file = MetricFile(write(tmp_path, "orchestrator", rows), "orchestrator")
    file.refresh()
    assert set(file.series) == {"time/weight_update", "dropped/error/a"}


def test_metrics_deprecated_name_alone_is_kept(tmp_path):
    file = MetricFile(write(tmp_path, "orchestrator", [{"step": 0, "time/switch": 1.0}]), "orchestrator")
    file.refresh()
    assert set(file.series) == {"time/switch"}


def test_metrics_replaced_file_discards_the_old_values(tmp_path):
    paths = write(tmp_path, "trainer", [{"step": 0, "loss": 1}, {"step": 1, "loss": 1}])
    file = MetricFile(paths, "trainer")
    file.refresh()
    paths.metrics("trainer").unlink()
    write(tmp_path, "trainer", [{"step": 0, "entropy": 2}])
    paths.metrics("trainer").rename(tmp_path / "kept")  # another inode, even if the file system reuses numbers
    write(tmp_path, "trainer", [{"step": 0, "entropy": 2}])
    assert file.refresh() is True
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
