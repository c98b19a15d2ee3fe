"""Which groups may start, which are dropped, and when consecutive drops fill the batch or end the run."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from prime_rl.configs.buffer import DifficultyPoolBufferConfig, OnlineDifficultyBufferConfig, SimpleBufferConfig
from prime_rl.configs.environment import EnvConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.types import Credit, Group
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


@pytest.mark.parametrize(
    ("batch_groups", "environments", "events", "actions"),
    [
        (2, 1, "f" * 20, "D" * 19 + "X"),
        (1, 1, ("f" * 9 + "k") * 5, "D" * 45),  # a kept group restarts the count
        (2, 1, "z" * 22 + "sz", "D" * 20 + "LL" + "D"),  # groups of zero advantages fill one batch
        (1, 1, "ffffz" + "f" * 5 + "z" + "f" * 10, "D" * 10 + "L" + "D" * 9 + "X"),  # errors alone do not fill it
        (1, 2, "f" * 10 + "F" * 10, "D" * 19 + "X"),  # only when all environments are exhausted
        (1, 2, "z" * 10 + "F" * 10 + "z", "D" * 20 + "L"),
        (3, 1, "ettee", "DDX"),  # errors fail after 600 s, but not less than a batch of groups
        (1, 1, "etktetfte", "DDDD"),  # a group that ends without an error restarts the time
        (1, 2, "ettettettett", "DDDD"),  # the other environment is healthy
        (1, 2, "Z" * 10 + "ettez" + "Z", "D" * 12 + "LL"),
    ],
)
def test_drop_policy_events_drop_fill_or_fail(clock, batch_groups, environments, events, actions):
    """Events: filtered, zero advantages, error, kept (of the second environment in upper case), ship, time of 400 s."""
    drops = DropPolicy(batch_groups, environments=environments, failing_seconds=600)
    taken = ""
    for number, event in enumerate(events):
        env, action = int(event.isupper()), None
        match event.lower():
            case "t":
                clock.now += 400
            case "s":
                drops.start_batch()
            case "k":
                drops.record_kept(env)
            case "e":
                action = drops.record_error(number, env)
            case kind:
                action = drops.record_filtered(kind == "z", env)
        taken += "" if action is None else {"DROP": "D", "FILL": "L", "FAIL": "X"}[action.name]
    assert taken == actions


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
    group = [make_rollout(versions=(0,) * length) for length in (7, 2)]  # and one token of the prompt
    assert not is_overlong(group, seq_len=8)
    assert is_overlong(group, seq_len=7)


def test_group_filter_equal_rewards_other_than_0_and_1_warns_once(said):
    def is_kept(buffer, *rewards):
        config = SimpleNamespace(buffer=buffer, seq_len=100, filter_zero_advantage=False)
        one = filters.setdefault(id(buffer), GroupFilter(config))
        return one.reason_to_drop(Group(0, tuple(map(make_rollout, rewards)), "aqua", 0, 1.0)) is None

    filters, filtering = {}, SimpleBufferConfig(online_difficulty_filtering=True)
    assert not is_kept(filtering, 1.0, 1.0)
    assert is_kept(filtering, 1.1, 0.1)
    for buffer in (SimpleBufferConfig(), OnlineDifficultyBufferConfig(max_reward=2)):
        assert is_kept(buffer, 1.1, 1.1)
    assert said() == []
    assert is_kept(filtering, 1.1, 1.1) and is_kept(filtering, 0.1, 0.1)
    (line,) = said()
    assert line.startswith("environment aqua gave all rollouts of a group the reward 1.1: online_difficulty_filtering")


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


def test_environment_health_simultaneous_errors_pause_once_and_one_success_resets(clock):
    """The groups started before the first error, so they count as one failure."""
    health = EnvironmentHealth(8)
    for group_id in range(1000):
        health.failed(group_id)
    assert (health.errors, health.pause_seconds) == (1000, pytest.approx(0.05))
    health.succeeded()
    assert (health.errors, health.failing_seconds, health.pause_seconds) == (0, 0.0, 0.0)
    assert len(start(health, range(100))) == 100
    health.failed(0)
    assert health.pause_seconds == pytest.approx(0.05)


def limits(*environments):
    env = [EnvConfig(id="reverse_text", name=f"e{i}", **keys) for i, keys in enumerate(environments)]
    return StartLimits(OrchestratorConfig(env=env, batch_size=8, rollouts_per_example=4))


def test_limits_rollouts_in_flight_but_never_below_one_group():
    both = limits({"max_concurrent": 9}, {"max_concurrent": 1}, {}, {"rollouts_per_example": 3, "max_concurrent": 6})
    assert list(both.counts) == [4, 4, 4, 3]
    for env, groups in ((0, 2), (1, 1), (3, 2)):
        for _ in range(groups):
            assert both.may_start(env)
            both.started(env)
        assert not both.may_start(env)
        both.ended(env)
        assert both.may_start(env)
    assert both.may_start(2)
    assert both.in_flight == [4, 0, 0, 3]


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
