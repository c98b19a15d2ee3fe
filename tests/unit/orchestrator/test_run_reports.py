"""The metrics of a batch, each against the formula, and the warnings of a run."""

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.core.types import Group, Rollout, Sample
from prime_rl.orchestrator.packing import TOKENS, pack
from prime_rl.orchestrator.run_reports import (
    RunCounters,
    RunWarnings,
    batch_metrics,
    group_sources,
    rollout_times,
    sample_metrics,
    solve_rates,
)
from prime_rl.rollouts.workers.protocol import DiscardedWork, RolloutSeconds


def make_rollout(reward, sampled, prompt=2, **metrics):
    mask = np.arange(prompt + sampled) >= prompt
    logprobs = np.where(mask, -reward - 1, 0).astype(np.float32)
    versions = np.where(mask, 0, -1).astype(np.int32)
    sample = Sample(np.arange(prompt + sampled, dtype=np.int32), mask, logprobs, versions)
    return Rollout((sample,), reward, metrics, sampled == 9, (("user", "q"),))


def make_group(group_id, env, *rollouts):
    return Group(group_id, rollouts, env, group_id, 1.0)


GROUPS = [
    make_group(0, "a", make_rollout(1.0, 3, right=1.0), make_rollout(0.0, 5, right=0.0)),
    make_group(1, "o/b", make_rollout(4.0, 9), make_rollout(2.0, 1)),
]
ADVANTAGES = [np.array([0.5, -0.5]), np.array([1.0, -3.0])]


def test_batch_metrics_equal_the_formulas():
    batch = pack(GROUPS, ADVANTAGES, 32, TOKENS, False)
    metrics = batch_metrics(1, GROUPS, ADVANTAGES, batch, 32)
    logprobs = np.repeat([-2.0, -1.0, -5.0, -3.0], [3, 5, 9, 1])
    expected = {
        "reward/mean": 1.75, "reward/std": np.std([1, 0, 4, 2]), "reward/min": 0, "reward/max": 4,
        "advantage/mean": -0.5, "advantage/std": np.std([0.5, -0.5, 1, -3]), "advantage/min": -3, "advantage/max": 1,
        "seq_len/mean": 6.5, "seq_len/min": 3, "seq_len/max": 11,
        "completion_len/mean": 4.5, "completion_len/min": 1, "completion_len/max": 9,
        "sampler_logprob/mean": logprobs.mean(), "staleness/max": 1, "metrics/right": 0.5,
        "env/a/batch_share": 0.5, "env/a/reward/std": 0.5, "env/a/reward/min": 0, "env/a/reward/max": 1,
        "env/a/completion_len/mean": 4, "env/a/is_truncated/mean": 0, "env/a/metrics/right": 0.5,
        "env/o/b/reward/std": 1, "env/o/b/completion_len/mean": 5, "env/o/b/is_truncated/mean": 0.5,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert group_sources(GROUPS) == {"env/a": [0], "env/o/b": [1]} and group_sources(GROUPS[:1]) == {}
    assert "env/o/b/metrics/right" not in metrics


def test_batch_metrics_lengths_include_masked_rollouts():
    batch = pack(GROUPS, ADVANTAGES, 32, TOKENS, mask_truncated=True)
    metrics = batch_metrics(1, GROUPS, ADVANTAGES, batch, 32)
    assert batch.loss_tokens == 9  # the truncated rollout has 9 of the 18 sampled tokens
    assert metrics["completion_len/mean"] == 4.5
    assert metrics["env/o/b/completion_len/mean"] == 5


def test_sample_metrics_count_samples_branches_and_false_forks():
    (one,) = make_rollout(1.0, 3).samples
    forks = {"false_forks/system": 1, "tokens_trained_twice": 0}
    rollouts = [
        replace(make_rollout(1.0, 3), samples=(one, one, one), sample_counts=forks),  # a true branch and a false fork
        make_rollout(1.0, 3),
        replace(make_rollout(1.0, 3), samples=()),
    ]
    assert sample_metrics(rollouts) == {
        "samples/per_rollout": pytest.approx(4 / 3), "samples/per_branch": pytest.approx(4 / 3),
        "samples/false_forks/system": 1, "samples/tokens_trained_twice": 0,
    }  # fmt: skip


def test_solve_rates_of_known_groups():
    rewards = [
        np.array(group) for group in ([1.0, 1.0, 1.1], [0.0, 0.9, 0.2], [1.0, 0.0, 0.0], [0.7 + 0.2 + 0.1, 1, 1])
    ]
    assert solve_rates(rewards, 1.0) == pytest.approx(
        {"groups/solved_all": 0.5, "groups/solved_none": 0.25, "pass@1": 7 / 12, "pass@2": (1 + 0 + 2 / 3 + 1) / 4}
    )
    assert solve_rates([], 1.0) == {}


@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5),
    st.floats(0.1, 3, allow_nan=False),
)
def test_solve_rates_equal_a_count_over_all_subsets(groups, threshold):
    rates = solve_rates([np.where(group, threshold, threshold - 0.1) for group in groups], threshold)
    smallest = min(map(len, groups))
    assert rates["groups/solved_all"] == np.mean([all(group) for group in groups])
    assert rates["groups/solved_none"] == np.mean([not any(group) for group in groups])
    assert {name for name in rates if name.startswith("pass@")} == {f"pass@{k}" for k in (1, 2, 4) if k <= smallest}
    for k in (k for k in (1, 2, 4) if k <= smallest):
        shares = [np.mean([any(subset) for subset in itertools.combinations(group, k)]) for group in groups]
        assert rates[f"pass@{k}"] == pytest.approx(np.mean(shares))


def test_run_counters_solve_rates_include_dropped_groups_once():
    counters = RunCounters()
    counters.arrived(GROUPS[0])
    counters.arrived(GROUPS[1])
    counters.discarded("zero_advantage", GROUPS[1])
    metrics = counters.next_batch([], DiscardedWork(), 1.0)
    assert (metrics["groups/solved_all"], metrics["groups/solved_none"], metrics["pass@1"]) == (0.5, 0, 0.75)
    assert metrics["reward/sampled/mean"] == 1.75
    metrics = counters.next_batch([], DiscardedWork(), 1.0)  # a batch of groups that ended before the last one
    assert "pass@1" not in metrics and math.isnan(metrics["reward/sampled/mean"])


def test_run_counters_restored_groups_are_no_work_since_the_last_batch():
    counters = RunCounters()
    counters.restored(GROUPS[0])
    counters.arrived(GROUPS[1])
    metrics = counters.next_batch(GROUPS, DiscardedWork(), 1.0)
    assert (metrics["tokens/sampled"], metrics["tokens/held"], metrics["tokens/unaccounted"]) == (18, 18, 0)
    assert metrics["reward/sampled/mean"] == 3
    assert metrics["perf/tokens_per_second"] * metrics["time/step"] == pytest.approx(10)


def test_rollout_times_are_means_since_the_last_call():
    seconds = RolloutSeconds()
    seconds.add(2, {"environment": 3.0, "engine": 1.0})
    seconds.add(2, {"engine": 2.0, "scoring": 6.0})
    pools = [SimpleNamespace(name="a", seconds=seconds), SimpleNamespace(name="b", seconds=RolloutSeconds())]
    expected = {"env/a/time/environment": 0.75, "env/a/time/engine": 0.75, "env/a/time/scoring": 1.5}
    assert rollout_times(pools) == expected
    assert rollout_times(pools) == {}


async def test_run_warnings_powers_of_ten_per_environment_are_written(tmp_path):
    path = tmp_path / "metrics" / "warnings.jsonl"
    warnings = RunWarnings(path)
    for number in range(150):
        warnings.add("group", "one", lambda count, number=number: f"group {number} is the {count}th")
    warnings.add("group", "two", str)
    warnings.add("worker", "one", str)
    await warnings.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["kind"], line["env"], line["count"]) for line in lines] == [
        ("group", "one", 1), ("group", "one", 10), ("group", "one", 100), ("group", "two", 1), ("worker", "one", 1),
    ]  # fmt: skip
    assert lines[2]["text"] == "group 99 is the 100th"


async def test_run_warnings_unwritable_file_is_logged(tmp_path, said):
    (tmp_path / "metrics").write_text("a file")
    warnings = RunWarnings(tmp_path / "metrics" / "warnings.jsonl")
    warnings.add("group", "one", str)
    await warnings.close()
    (line,) = said()
    assert "cannot be written" in line


async def test_run_warnings_no_failures_write_no_file(tmp_path):
    await RunWarnings(tmp_path / "warnings.jsonl").close()
    assert list(tmp_path.iterdir()) == []
