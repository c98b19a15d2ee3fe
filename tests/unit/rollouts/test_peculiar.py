"""What an environment does that main must survive, report or refuse; in real worker processes."""

import asyncio
import os

import pytest
from loguru import logger

from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.group_attempts import EnvironmentFailed
from tests.support.fake_engine import fake_engine

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def open_peculiar(open_pool):
    return lambda does, **kwargs: open_pool(name="peculiar_environment", does=does, **kwargs)


def play(pool, engine):
    return pool.run_group(0, 2, engine.url, {"max_tokens": 4, "temperature": 1.0}, 64)


@pytest.fixture
def logged():
    lines = []
    handler = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    yield lines
    logger.remove(handler)


async def test_worker_with_lone_surrogates_in_its_answer_replaces_them(open_peculiar):
    async with fake_engine() as engine, open_peculiar("surrogates") as pool:
        rollouts = await play(pool, engine)
    assert rollouts[0].text[-1] == ("user", "caf?")
    assert rollouts[0].metrics["caf?"] == 2.0


async def test_worker_with_a_lone_surrogate_in_an_exception_reports_it(open_peculiar):
    async with fake_engine() as engine, open_peculiar("surrogate error") as pool:
        with pytest.raises(EnvironmentFailed, match=r"raised FileNotFoundError: no file caf\?\.txt"):
            await play(pool, engine)
        assert pool.deaths == 0


@pytest.mark.extended
async def test_pool_logs_a_warning_of_all_workers_once(open_peculiar, logged):
    async with fake_engine() as engine, open_peculiar("sampling", workers=2) as pool:
        await asyncio.gather(*(play(pool, engine) for _ in range(4)))
    (line,) = [line for line in logged if "sampling parameters are ignored" in line]
    assert line.startswith("environment peculiar_environment: ") and "temperature = 0.1" in line
    assert {request["sampling_params"]["temperature"] for request in engine.requests} == {1.0}


async def test_pool_returns_advantages_of_the_environment_and_refuses_implausible_ones(open_peculiar):
    async with fake_engine() as engine:
        async with open_peculiar("advantage") as pool:
            (credit,) = (await play(pool, engine))[0].credits
            assert (credit.name, credit.reward, credit.advantage) == ("turn 0", 1.0, 1.0)
        async with open_peculiar("huge advantage") as pool:
            with pytest.raises(EnvironmentFailed, match=r"advantage of turn 0 is 1e\+30, above the limit"):
                await play(pool, engine)


async def test_pool_names_the_example_whose_prompt_cannot_be_rendered(open_peculiar):
    with pytest.raises(ConfigError, match=r"prompt of example 1 .* cannot be rendered: ValueError: .*'image_url'") as e:
        async with open_peculiar("picture", check_seq_len=64):
            pass
    assert "\n" not in str(e.value)


async def test_worker_sizes_thread_and_process_pools_like_verifiers(open_peculiar):
    """Forty threads wait for each other; by default there are six on two cores, and one process for MathRubric."""
    async with fake_engine() as engine, open_peculiar("executors") as pool:
        metrics = (await pool.run_group(0, 1, engine.url, {"max_tokens": 4}, 64))[0].metrics
    assert metrics["threads"] == 40
    assert metrics["processes"] == min(4, os.cpu_count())


@pytest.mark.extended
@pytest.mark.parametrize(
    ("cancels", "cleanup_seconds", "grace_seconds", "left"),
    [(False, 2.5, 60.0, "cleaned"), (True, 2.5, 60.0, "cleaned"), (False, 1000.0, 0.5, "waiting")],
    ids=["close", "cancel and close", "cleanup takes too long"],
)
async def test_closing_a_pool_waits_for_the_cleanup_of_its_groups(
    open_peculiar, tmp_path, cancels, cleanup_seconds, grace_seconds, left
):
    marker = tmp_path / "marker"
    async with fake_engine() as engine:
        async with open_peculiar(
            "cleanup", marker=str(marker), cleanup_seconds=cleanup_seconds, grace_seconds=grace_seconds
        ) as pool:
            group = asyncio.create_task(play(pool, engine))
            async with asyncio.timeout(60):
                while not marker.exists():
                    await asyncio.sleep(0.01)
            if cancels:
                group.cancel()
        await asyncio.gather(group, return_exceptions=True)
    assert marker.read_text() == left
