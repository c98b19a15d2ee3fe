"""Limits of an environment on its own rollouts."""

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.shared.blocks import EnvConfig
from prime_rl.orchestrator.health.start_limits import StartLimits


def limits(*environments, clock=lambda: 0.0):
    return StartLimits(
        OrchestratorConfig(
            env=[EnvConfig(name=f"e{i}", **keys) for i, keys in enumerate(environments)],
            batch_size=8,
            rollouts_per_example=4,
        ),
        clock,
    )


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


def test_limits_starts_per_minute_evenly():
    now = [100.0]
    limited = limits({"max_rollouts_per_minute": 60, "rollouts_per_example": 2}, clock=lambda: now[0])
    assert limited.may_start(0)
    assert limited.started(0) == 2.0
    assert not limited.may_start(0)
    now[0] += 1.9
    assert not limited.may_start(0)
    now[0] += 0.1
    assert limited.may_start(0)
