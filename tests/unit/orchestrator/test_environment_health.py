"""A failing environment is paused, retried with few groups, and healthy again after one success."""

import pytest

from prime_rl.orchestrator.health.environment_health import EnvironmentHealth


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def start(health, group_ids):
    """Start as many of `group_ids` as allowed; return them."""
    started = []
    for group_id in group_ids:
        if not health.may_start:
            break
        health.started(group_id)
        started.append(group_id)
    return started


def test_environment_health_without_errors_starts_any_number(clock):
    assert len(start(EnvironmentHealth(4, clock=clock), range(1000))) == 1000


def test_environment_health_only_errors_pauses_longer_and_tries_fewer(clock):
    health = EnvironmentHealth(8, longest_pause_s=30, clock=clock)
    ids = iter(range(10**6))
    flying = start(health, [next(ids) for _ in range(24)])
    pauses, tried = [], []
    while health.failing_s < 600:
        for group_id in flying:
            health.failed(group_id)
        pauses.append(health.pause_s)
        assert not health.may_start
        clock.now += health.pause_s
        flying = start(health, [next(ids) for _ in range(100)])
        tried.append(len(flying))
    assert pauses[:4] == pytest.approx([0.05, 0.1, 0.2, 0.4])
    assert max(pauses) == pauses[-1] == pytest.approx(30)
    assert tried[:4] == [4, 2, 1, 1]
    assert health.errors >= 8, "a batch of errors, so that the run may end"
    assert health.errors < 80, "an outage of ten minutes costs few examples"


def test_environment_health_one_success_resets(clock):
    health = EnvironmentHealth(8, clock=clock)
    for group_id in range(24):
        health.failed(group_id)
    health.succeeded()
    assert (health.errors, health.failing_s, health.pause_s) == (0, 0.0, 0.0)
    assert len(start(health, range(100))) == 100
    health.failed(0)
    assert health.pause_s == pytest.approx(0.05)


def test_environment_health_simultaneous_errors_pause_once(clock):
    """The groups started before the first error, so they count as one failure."""
    health = EnvironmentHealth(8, clock=clock)
    for group_id in range(1000):
        health.failed(group_id)
    assert health.pause_s == pytest.approx(0.05)
    assert health.errors == 1000
