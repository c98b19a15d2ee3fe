"""Batches that teach nothing are noticed from the metrics on the disk, with the probable cause."""

import json
import re

import pytest

from prime_rl.monitors.learning_signal import LearningSignalMonitor, find_missing_signal


def row(step, zero=1.0, **values):
    given = {
        "batch/zero_advantage_groups": zero,
        "batch/rollouts_per_group": 4.0,
        "batch/zero_advantage_filler": 0,
        "reward/mean": 0.25,
        "reward/std": 0.0,
    }
    return {"step": step, **given, **{name.replace("__", "/"): value for name, value in values.items()}}


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"batch__rollouts_per_group": 1.0}, "a group of one rollout .*rollouts_per_example"),
        ({}, r"all rewards are 0.25; look at samples/step_6.jsonl"),
        ({"reward__std": 0.3, "batch__zero_advantage_filler": 2}, "every group was dropped"),
        ({"reward__std": 0.3}, "rewards differ between examples but never within a group"),
    ],
)
def test_missing_signal_of_three_batches_names_its_cause(values, cause):
    rows = [row(3, zero=0.5), *(row(step, **values) for step in (4, 5, 6))]
    warning = find_missing_signal(json.loads(json.dumps(rows)))
    assert warning is not None
    assert re.match(f"all advantages of batches 4 to 6 are 0, so the policy learns nothing: {cause}", warning), warning


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(0), row(1)],
        [row(0), row(1), row(2, zero=0.99)],
        [row(0), row(2), row(3)],
    ],
)
def test_missing_signal_of_fewer_batches_in_a_row_is_nothing(rows):
    assert find_missing_signal(rows) is None


def test_learning_signal_monitor_warns_once_and_again_after_a_batch_with_signal():
    watch = LearningSignalMonitor()
    rows = [row(0), row(1), {"step": 1, "eval/toy/mean": 0.5}, row(2), row(3), row(4, zero=0.5), row(5), row(6), row(7)]
    warned = [given["step"] for given in rows if watch.add(given) is not None]
    assert warned == [2, 7]
