"""The rollouts of a group: retries, survivors, clocks, and what foreign code may raise."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import aiohttp
import pytest
import verifiers as vf

from prime_rl.configs.environment import EnvConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.types import Credit, Rollout
from prime_rl.rollouts.clients.inference_client import InferenceServerLost
from prime_rl.rollouts.group_attempts import (
    EnvironmentFailed,
    GroupAccount,
    GroupAttempts,
    RolloutClock,
    RolloutTimedOut,
    check_scores,
    contain_failures,
    is_infrastructure,
)
from prime_rl_sandbox.execution import SandboxError
from tests.support.virtual_clock import virtual_clock


class Custom(BaseException):
    pass


class Overloaded(Exception):
    status_code = 503


def make_group(count=4, is_train=True, account=None, server=None, **config):
    return GroupAttempts(EnvConfig(id="e", **config), 3, count, server, None, account or GroupAccount(), is_train)


def failing(fails):
    """An attempt that fails for the (rollout, attempt) of `fails`; returns what was tried as well."""
    tried = []

    async def attempt(this):
        tried.append((this.index, this.number))
        await asyncio.sleep(0)
        if (error := fails.get((this.index, this.number))) is not None:
            raise error
        return this.index

    return attempt, tried


@virtual_clock
async def test_group_retries_only_the_rollout_with_an_infrastructure_failure():
    fault = EnvironmentFailed("sandbox", is_infrastructure=True)
    attempt, tried = failing({(1, 0): fault})
    account = GroupAccount()
    assert await make_group(account=account).run(attempt) == [0, 1, 2, 3]
    assert sorted(tried) == [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0)]
    assert account.discarded == {"retried": (1, 0)}
    attempt, tried = failing({(1, number): fault for number in range(3)})
    with pytest.raises(EnvironmentFailed, match="sandbox"):
        await make_group(num_retries=2).run(attempt)
    assert (1, 2) in tried and (1, 3) not in tried
    attempt, tried = failing({(1, 0): EnvironmentFailed("KeyError: x")})
    with pytest.raises(EnvironmentFailed, match="KeyError: x"):
        await make_group(num_retries=5).run(attempt)
    assert (1, 1) not in tried


@pytest.mark.parametrize(("bad", "survivors"), [([2], [0, 1, 3]), ([0, 2], [1, 3]), ([0, 1, 2], None)])
async def test_group_with_enough_survivors_is_kept(bad, survivors):
    attempt, _ = failing({(index, 0): EnvironmentFailed(f"broken {index}") for index in bad})
    account = GroupAccount()
    group = make_group(min_rollouts=2, account=account)
    if survivors is None:
        with pytest.raises(EnvironmentFailed, match="broken"):
            await group.run(attempt)
    else:
        assert await group.run(attempt) == survivors
        assert account.discarded == {"failed": (len(bad), 0)}


async def test_evaluation_group_is_complete_or_fails():
    attempt, _ = failing({(2, 0): EnvironmentFailed("broken")})
    with pytest.raises(EnvironmentFailed):
        await make_group(is_train=False, min_rollouts=2).run(attempt)


async def test_group_reports_a_lost_server_before_other_failures():
    attempt, _ = failing({(0, 0): EnvironmentFailed("broken"), (1, 0): InferenceServerLost("inference is gone")})
    with pytest.raises((InferenceServerLost, EnvironmentFailed)):
        await make_group().run(attempt)
    attempt, _ = failing({(1, 0): InferenceServerLost("inference is gone")})
    with pytest.raises(InferenceServerLost, match="inference is gone"):
        await make_group(min_rollouts=1).run(attempt)


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), KeyboardInterrupt("x"), Custom("x"), GeneratorExit("x"), SystemExit("x"),
     asyncio.CancelledError("x")],
)  # fmt: skip
async def test_contain_failures_converts_exceptions_of_foreign_code(error):
    with pytest.raises(EnvironmentFailed, match=f"^{type(error).__name__}: x"), contain_failures():
        raise error


async def test_contain_failures_passes_a_real_cancellation():
    started = asyncio.Event()

    async def work():
        started.set()
        with contain_failures():
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def raised_from(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (vf.InfraError("x"), True), (vf.SandboxError("x"), True), (SandboxError("x"), True),
        (ConnectionRefusedError("x"), True), (TimeoutError("x"), True), (aiohttp.ServerDisconnectedError(), True),
        (Overloaded("x"), True),
        (raised_from(RuntimeError("judge"), ConnectionError("x")), True),
        (raised_from(vf.ToolCallError("x"), ZeroDivisionError("x")), False), (KeyError("x"), False),
        (FileNotFoundError("x"), False),
    ],
)  # fmt: skip
def test_is_infrastructure_recognises_infrastructure_failures(error, expected):
    assert is_infrastructure(error) is expected


@virtual_clock
async def test_clock_stops_while_paused():
    stuck = []
    async with RolloutClock(1, 60, lambda: stuck.append(1)) as clock:
        with clock.paused():
            await asyncio.sleep(3)
            with clock.paused():
                await asyncio.sleep(4)
            await asyncio.sleep(8)
        await asyncio.sleep(0.5)
    assert (clock.expired, clock.running_seconds, clock.paused_seconds) == (False, 0.5, 15)
    with pytest.raises(RolloutTimedOut, match="a rollout took longer than 10 s"):
        async with (clock := RolloutClock(10, 60, lambda: stuck.append(1))):
            for _ in range(9):
                await asyncio.sleep(4)
                with clock.paused():
                    await asyncio.sleep(4)
    assert clock.expired and clock.running_seconds == 10
    await asyncio.sleep(100)
    assert stuck == []


@virtual_clock
async def test_sampling_time_does_not_count_for_the_time_limit():
    async def generate(prompt_ids, sampling):
        await asyncio.sleep(60)
        return SimpleNamespace(token_ids=[7])

    async def attempt(this):
        async with this.clock:
            await this.server.generate([1], {})
        return this.sampled

    group = make_group(2, server=SimpleNamespace(generate=generate), timeout_seconds=1)
    assert await group.run(attempt) == [1, 1]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"timeout_seconds": 9}, r"9 s \(env\.timeout_seconds\)"),
        ({"timeout_seconds": 9, "scoring_timeout_seconds": 1}, r"1 s \(env\.scoring_timeout_seconds\)"),
    ],
)
@virtual_clock
async def test_scoring_has_its_own_time_limit(limits, message):
    with pytest.raises(RolloutTimedOut, match=f"the scoring of example 3 took longer than {message}"):
        await make_group(**limits).repeat(asyncio.Event().wait)


@virtual_clock
async def test_group_adds_the_seconds_of_its_finished_rollouts():
    account = GroupAccount()
    group = make_group(2, account=account)

    async def attempt(this):
        if this.index == 1:
            await asyncio.sleep(9)
            raise EnvironmentFailed("it does not count")
        async with this.clock:
            await asyncio.sleep(1)
            with this.clock.paused():
                await asyncio.sleep(2)

    async def score():
        await asyncio.sleep(4)

    with pytest.raises(EnvironmentFailed):
        await group.run(attempt)
    await group.repeat(score)
    assert account.seconds == {"environment": 1, "engine": 2, "scoring": 4}


@virtual_clock
async def test_clock_reports_a_block_that_does_not_end():
    stuck = asyncio.Event()
    clock = RolloutClock(1, 2, stuck.set)
    async with clock:
        while not stuck.is_set():
            try:
                await stuck.wait()
            except asyncio.CancelledError:
                continue
    assert clock.expired


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": 1e30}, "the reward is 1e\\+30, above the limit of 1e\\+06"),
        ({"reward": float("nan")}, "the reward is nan, not a finite number"),
        ({"metrics": {"a": float("inf")}}, "metric a is inf"),
        ({"credits": (Credit("turn 0", 1e30),)}, "the reward of turn 0 is 1e\\+30"),
        ({"credits": (Credit("", 1.0, -1e30),)}, "the advantage of the rollout is -1e\\+30"),
    ],
)
def test_implausible_score_is_refused(changes, message):
    rollout = Rollout((), 1.0, {}, False, ())
    check_scores(rollout)
    with pytest.raises(EnvironmentFailed, match=message):
        check_scores(replace(rollout, **changes))


def test_default_time_limit_ends_a_rollout_before_the_orchestrator_gives_up():
    assert EnvConfig().timeout_seconds < OrchestratorConfig().wait_timeout_seconds
