"""Batches that teach nothing are noticed from the metrics on the disk, with the probable cause."""

import json
import re

import pytest

from prime_rl.monitors.learning_signal import LearningSignalMonitor, find_missing_signal


def row(step, zero=1.0, **values):
    given = {
        "batch/zero_advantage_groups": zero, "batch/rollouts_per_group": 4.0, "batch/zero_advantage_filler": 0,
        "reward/mean": 0.25, "reward/std": 0.0,
    }  # fmt: skip
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


@pytest.mark.parametrize("rows", [[], [row(0), row(1)], [row(0), row(1), row(2, zero=0.99)], [row(0), row(2), row(3)]])
def test_missing_signal_of_fewer_batches_in_a_row_is_nothing(rows):
    assert find_missing_signal(rows) is None


def test_learning_signal_monitor_warns_once_and_again_after_a_batch_with_signal():
    watch = LearningSignalMonitor()
    rows = [row(0), row(1), {"step": 1, "eval/toy/mean": 0.5}, row(2), row(3), row(4, zero=0.5), row(5), row(6), row(7)]
    warned = [given["step"] for given in rows if watch.add(given)]
    assert warned == [2, 7]


def mixture(step, **zero):
    """A batch of environments with these shares of groups without a gradient, four groups each."""
    whole = sum(zero.values()) / len(zero)
    of_env = {
        f"env/{env}/{name}": value
        for env, share in zero.items()
        for name, value in {"zero_advantage_groups": share, "batch_share": 1 / len(zero), "groups": 4}.items()
    }
    return {"step": step, "batch/zero_advantage_groups": whole, "reward/one/mean": 1.0, **of_env}


def test_learning_signal_monitor_warns_once_about_one_environment_of_a_mixture():
    watch = LearningSignalMonitor()
    given = [watch.add(mixture(step, one=1.0, other=0.25)) for step in range(9)]
    assert [step for step, warnings in enumerate(given) if warnings] == [4]
    ((kind, env, text),) = given[4]
    assert (kind, env) == ("signal", "one")
    assert "all advantages of its 20 groups in 5 batches are 0 (mean reward 1)" in text
    assert "buffer.online_difficulty_filtering" in text
    watch.add(mixture(9, one=0.5, other=0.25))
    again = [watch.add(mixture(step, one=1.0, other=0.25)) for step in range(10, 15)]
    assert [bool(warnings) for warnings in again] == [False] * 4 + [True], "after a batch with a signal"
    watch = LearningSignalMonitor()
    given = [warning for step in range(8) for warning in watch.add(mixture(step, one=1.0))]
    assert [(kind, env) for kind, env, _ in given] == [("signal", "")], "a single one: the warning of the batch"


def test_learning_signal_monitor_warns_once_about_tokens_without_a_counterpart():
    watch = LearningSignalMonitor()
    shares = [0.05, 0.5, 0.6]
    given = [watch.add(row(n, zero=0.0) | {"batch/uncompared_tokens": share}) for n, share in enumerate(shares)]
    assert [len(warnings) for warnings in given] == [0, 1, 0]
    assert "50% of the tokens of batch 1" in given[1][0][2] and given[1][0][0] == "credit"
