"""Which groups may start, which are dropped, and when consecutive drops fill the batch or end the run."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.configs.buffer import DifficultyPoolBufferConfig, OnlineDifficultyBufferConfig, SimpleBufferConfig
from prime_rl.configs.environment import EnvConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.types import Credit, Group, Rollout, Sample
from prime_rl.orchestrator import group_filter
from prime_rl.orchestrator.group_filter import (
    DropAction,
    DropPolicy,
    EnvironmentHealth,
    GroupFilter,
    StartLimits,
    is_off_difficulty,
    is_overlong,
)
from tests.unit.evaluation.fakes import make_rollout


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(group_filter.time, "monotonic", clock)
    return clock


def test_drop_policy_consecutive_filtered_groups_fail():
    drops = DropPolicy(batch_groups=2)
    assert [drops.record_filtered() for _ in range(20)] == [DropAction.DROP] * 19 + [DropAction.FAIL]
    assert drops.num_consecutive_drops == 20


@pytest.mark.parametrize(
    ("at_start_seconds", "first", "limit_seconds", "key"),
    [
        (math.inf, None, 600, "failing_env_seconds"),
        (120, None, 120, "failing_at_start_seconds"),
        (120, "record_kept", 600, "failing_env_seconds"),
        (120, "record_filtered", 600, "failing_env_seconds"),
    ],
)
def test_drop_policy_errors_fail_after_the_timeout(clock, at_start_seconds, first, limit_seconds, key):
    """Errors alone, however many, do not end the run at once; before the first success they end it sooner."""
    drops = DropPolicy(batch_groups=2, failing_seconds=600, failing_at_start_seconds=at_start_seconds)
    if first is not None:
        getattr(drops, first)()
    assert {drops.record_error(group_id) for group_id in range(1000)} == {DropAction.DROP}
    clock.now += limit_seconds - 1
    assert drops.record_error(1000) is DropAction.DROP
    clock.now += 1
    assert drops.failure_timeout(0) == (limit_seconds, f"orchestrator.{key}")
    assert drops.record_error(1001) is DropAction.FAIL
    assert drops.num_consecutive_drops == 1002 + (first == "record_filtered")


def test_drop_policy_group_without_error_restarts_the_timeout(clock):
    drops = DropPolicy(batch_groups=2, failing_seconds=600)
    for outcome in (drops.record_kept, drops.record_filtered):
        for group_id in range(10):
            drops.record_error(group_id)
        clock.now += 590
        outcome()
        assert drops.health[0].failing_seconds == 0
        clock.now += 590
    assert drops.record_error(10) is DropAction.DROP


def test_drop_policy_fewer_errors_than_a_batch_do_not_fail(clock):
    drops = DropPolicy(batch_groups=3, failing_seconds=600)
    assert drops.record_error(0) is DropAction.DROP
    clock.now += 10_000
    assert drops.record_error(1) is DropAction.DROP, "less than a batch of groups"
    assert drops.record_error(2) is DropAction.FAIL


def test_drop_policy_one_exhausted_environment_is_skipped_until_the_ship():
    drops = DropPolicy(batch_groups=2, environments=2)
    for _ in range(20):
        assert drops.may_start(0)
        assert drops.record_filtered(env=0) is DropAction.DROP
    assert not drops.may_start(0)
    assert drops.may_start(1)
    assert drops.record_filtered(env=0) is DropAction.DROP, "one that was under way"
    drops.record_kept(1)
    assert not drops.may_start(0)
    drops.start_batch()
    assert drops.may_start(0)


@pytest.mark.parametrize("zero_advantage", [False, True])
def test_drop_policy_all_environments_exhausted_fails_or_fills(zero_advantage):
    drops = DropPolicy(batch_groups=1, environments=2)
    for _ in range(10):
        drops.record_filtered(zero_advantage, env=0)
    verdicts = [drops.record_filtered(env=1) for _ in range(10)]
    assert verdicts == [DropAction.DROP] * 9 + [DropAction.DROP if zero_advantage else DropAction.FAIL]
    if zero_advantage:
        assert drops.may_start(0), "its groups fill the batch"
        assert drops.record_filtered(zero_advantage=True, env=0) is DropAction.FILL


def test_drop_policy_failing_environment_with_a_healthy_one_never_fails(clock):
    drops = DropPolicy(batch_groups=1, environments=2, failing_seconds=10)
    for group_id in range(500):
        clock.now += 30
        assert drops.record_error(group_id, env=0) is DropAction.DROP
    assert drops.may_start(1)


def test_drop_policy_failing_and_saturated_environments_fill_the_batch(clock):
    drops = DropPolicy(batch_groups=1, environments=2, failing_seconds=10)
    for _ in range(10):
        drops.record_filtered(zero_advantage=True, env=1)
    assert drops.record_error(0, env=0) is DropAction.DROP
    clock.now += 10
    assert drops.record_error(1, env=0) is DropAction.DROP
    assert drops.record_filtered(zero_advantage=True, env=1) is DropAction.FILL


def test_drop_policy_kept_group_restarts_the_count():
    drops = DropPolicy(batch_groups=1)
    for _ in range(50):
        assert [drops.record_filtered() for _ in range(9)] == [DropAction.DROP] * 9
        drops.record_kept()


def test_drop_policy_consecutive_zero_advantages_fill_one_batch():
    drops = DropPolicy(batch_groups=2)
    assert [drops.record_filtered(zero_advantage=True) for _ in range(22)] == [DropAction.DROP] * 20 + [
        DropAction.FILL
    ] * 2
    drops.start_batch()
    assert drops.record_filtered(zero_advantage=True) is DropAction.DROP


def test_drop_policy_one_zero_advantage_group_among_others_fills():
    drops = DropPolicy(batch_groups=1)
    kinds = [False] * 4 + [True] + [False] * 5
    assert [drops.record_filtered(zero_advantage=kind) for kind in kinds] == [DropAction.DROP] * 10
    assert drops.record_filtered(zero_advantage=True) is DropAction.FILL
    assert [drops.record_filtered() for _ in range(10)][-1] is DropAction.FAIL, "errors alone go on"


@given(st.integers(1, 3), st.lists(st.sampled_from(["kept", "error", "zero"]), max_size=200))
def test_drop_policy_any_events_cost_less_than_20_batches_per_kept_group(batch_groups, events):
    drops = DropPolicy(batch_groups)
    kept = dropped = 0
    for event in events:
        if event == "kept":
            drops.record_kept()
            verdict = None
        else:
            verdict = drops.record_filtered(zero_advantage=event == "zero")
            if verdict is DropAction.FAIL:
                break
        kept += verdict in (None, DropAction.FILL)
        dropped += verdict is DropAction.DROP
        assert dropped < 20 * batch_groups * (kept + 1)
        if kept == batch_groups:
            drops.start_batch()
            kept = dropped = 0


def test_drop_policy_credit_follows_the_drop_rate_up_to_the_limit():
    drops = DropPolicy(batch_groups=10, oversampling=1.5)
    assert drops.credit(in_flight=40) == 0, "no drop was seen"
    for group in range(1000):
        if group % 10:
            drops.record_kept()
        else:
            drops.record_filtered(zero_advantage=True)
    assert drops.credit(in_flight=40) == pytest.approx(4, abs=1)
    for _ in range(90):
        drops.record_filtered(zero_advantage=True)
    assert drops.credit(in_flight=40) == 5, "half a batch"
    assert DropPolicy(batch_groups=10).credit(in_flight=40) == 0


@pytest.mark.parametrize(
    ("buffer", "rewards", "dropped"),
    [
        (SimpleBufferConfig(), [0, 0], False),
        (SimpleBufferConfig(online_difficulty_filtering=True), [0, 0], True),
        (SimpleBufferConfig(online_difficulty_filtering=True), [1, 1], True),
        (SimpleBufferConfig(online_difficulty_filtering=True), [0.7 + 0.2 + 0.1, 1], True),  # slightly below 1
        (SimpleBufferConfig(online_difficulty_filtering=True), [1, 0], False),
        (DifficultyPoolBufferConfig(online_difficulty_filtering=True), [1, 1], True),
        (OnlineDifficultyBufferConfig(), [0, 0], True),
        (OnlineDifficultyBufferConfig(min_reward=0.5, max_reward=0.5), [1, 0], False),
        (OnlineDifficultyBufferConfig(max_reward=0.4), [1, 0], True),
        (SimpleBufferConfig(online_difficulty_filtering=True), [1, -1], False),
    ],
)
def test_group_filter_rewards_decide_by_buffer(buffer, rewards, dropped):
    group = Group(0, tuple(map(make_rollout, rewards)), "env", 0, 1.0)
    assert is_off_difficulty(group, buffer) is dropped


@pytest.mark.parametrize(
    ("credits", "dropped"),
    [([(1, None), (-1, None)], False), ([(0, None), (0, None)], True), ([(0, 0.5), (0, None)], False)],
)
def test_group_filter_looks_at_each_agent_of_an_episode(credits, dropped):
    """The reward of an episode is the mean over its agents, here 0."""
    parts = tuple(Credit(f"agent {number}", reward, advantage) for number, (reward, advantage) in enumerate(credits))
    group = Group(0, (replace(make_rollout(0.0), credits=parts),) * 4, "env", 0, 1.0)
    assert is_off_difficulty(group, SimpleBufferConfig(online_difficulty_filtering=True)) is dropped


def test_is_overlong_sample_longer_than_seq_len():
    def rollout(length):
        zeros = np.zeros(length, np.int32)
        return Rollout((Sample(zeros, zeros == 0, zeros.astype(np.float32), zeros),), 0.0, {}, False, ())

    assert not is_overlong([rollout(8), rollout(3)], seq_len=8)
    assert is_overlong([rollout(8), rollout(9)], seq_len=8)


def test_group_filter_equal_rewards_other_than_0_and_1_warns_once(said):
    def drops(buffer, env, *rewards):
        config = SimpleNamespace(buffer=buffer, seq_len=100, filter_zero_advantage=False)
        one = filters.setdefault(id(buffer), GroupFilter(config))
        return one.reason_to_drop(Group(0, tuple(map(make_rollout, rewards)), env, 0, 1.0)) is not None

    filters = {}
    filtering = SimpleBufferConfig(online_difficulty_filtering=True)
    assert drops(filtering, "aqua", 1.0, 1.0)
    assert not drops(filtering, "aqua", 1.1, 0.1)
    assert said() == []
    assert not drops(filtering, "aqua", 1.1, 1.1)
    assert not drops(filtering, "aqua", 0.1, 0.1)
    (line,) = said()
    assert line.startswith("environment aqua gave all rollouts of a group the reward 1.1: online_difficulty_filtering")
    plain, online = SimpleBufferConfig(), OnlineDifficultyBufferConfig(max_reward=2)
    assert not drops(plain, "other", 1.1, 1.1)
    assert not drops(online, "other", 1.1, 1.1)
    assert len(said()) == 1


# --- the start of groups --------------------------------------------------------------------------------------


def start(health, group_ids):
    """Start as many of `group_ids` as allowed; return them."""
    started = []
    for group_id in group_ids:
        if not health.may_start:
            break
        health.started(group_id)
        started.append(group_id)
    return started


def test_environment_health_without_errors_starts_any_number():
    assert len(start(EnvironmentHealth(4), range(1000))) == 1000


def test_environment_health_only_errors_pauses_longer_and_tries_fewer(clock):
    health = EnvironmentHealth(8, longest_pause_seconds=30)
    ids = iter(range(10**6))
    flying = start(health, [next(ids) for _ in range(24)])
    pauses, tried = [], []
    while health.failing_seconds < 600:
        for group_id in flying:
            health.failed(group_id)
        pauses.append(health.pause_seconds)
        assert not health.may_start
        clock.now += health.pause_seconds
        flying = start(health, [next(ids) for _ in range(100)])
        tried.append(len(flying))
    assert pauses[:4] == pytest.approx([0.05, 0.1, 0.2, 0.4])
    assert max(pauses) == pauses[-1] == pytest.approx(30)
    assert tried[:4] == [4, 2, 1, 1]
    assert health.errors >= 8, "a batch of errors, so that the run may end"
    assert health.errors < 80, "an outage of ten minutes costs few examples"


def test_environment_health_one_success_resets(clock):
    health = EnvironmentHealth(8)
    for group_id in range(24):
        health.failed(group_id)
    health.succeeded()
    assert (health.errors, health.failing_seconds, health.pause_seconds) == (0, 0.0, 0.0)
    assert len(start(health, range(100))) == 100
    health.failed(0)
    assert health.pause_seconds == pytest.approx(0.05)


def test_environment_health_simultaneous_errors_pause_once(clock):
    """The groups started before the first error, so they count as one failure."""
    health = EnvironmentHealth(8)
    for group_id in range(1000):
        health.failed(group_id)
    assert health.pause_seconds == pytest.approx(0.05)
    assert health.errors == 1000


def limits(*environments):
    env = [EnvConfig(name=f"e{i}", **keys) for i, keys in enumerate(environments)]
    return StartLimits(OrchestratorConfig(env=env, batch_size=8, rollouts_per_example=4))


def test_limits_rollouts_in_flight_but_never_below_one_group():
    both = limits({"max_concurrent": 9}, {"max_concurrent": 1}, {})
    for env, groups in ((0, 2), (1, 1)):
        for _ in range(groups):
            assert both.may_start(env)
            both.started(env)
        assert not both.may_start(env)
        both.ended(env)
        assert both.may_start(env)
    assert both.may_start(2)
    assert both.in_flight == [4, 0, 0]


def test_limits_rollouts_of_another_group_size():
    own = limits({"rollouts_per_example": 3, "max_concurrent": 6}, {})
    assert list(own.counts) == [3, 4]
    own.started(0)
    own.started(0)
    assert not own.may_start(0)


def test_limits_starts_per_minute_evenly(clock):
    limited = limits({"max_rollouts_per_minute": 60, "rollouts_per_example": 2})
    assert limited.may_start(0)
    limited.started(0)
    assert limited.next_start[0] == clock.now + 2.0
    assert not limited.may_start(0)
    clock.now += 1.9
    assert not limited.may_start(0)
    clock.now += 0.1
    assert limited.may_start(0)
