"""Every example ends in one row; only what concerns the whole evaluation raises."""

import asyncio

import pytest

from prime_rl.configs.environment import EvalEnvConfig
from prime_rl.configs.sampling import SamplingConfig
from prime_rl.core.errors import RunError
from prime_rl.evaluation import eval_session
from prime_rl.evaluation.eval_plan import EvalTask
from prime_rl.evaluation.eval_session import FixedServers, run_examples
from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost
from prime_rl.rollouts.group_attempts import EnvironmentFailed, SampleTooLong
from tests.support.fake_chat import fake_chat
from tests.unit.evaluation.fakes import AnyServer, FakePool


async def rows_of(pool, servers=None, max_concurrent=None, seed=None):
    rows = {}

    def done(row):
        assert row.example not in rows
        rows[row.example] = row

    task = EvalTask(EvalEnvConfig(id=pool.name), SamplingConfig(seed=seed), -1, rollouts=2)
    await run_examples(task, pool, range(len(pool)), 64, max_concurrent, servers or AnyServer(), done)
    return rows


@pytest.mark.parametrize(("limit", "most"), [(None, 40), (3, 2), (1, 2)])
async def test_number_of_rollouts_in_flight_is_limited(limit, most):
    pool = FakePool(20)
    rows = await rows_of(pool, max_concurrent=limit)
    assert sorted(rows) == list(range(20))
    assert pool.most == most, "at least one example, in whole groups"


async def test_failures_have_a_kind_and_other_examples_continue():
    failures = {1: EnvironmentFailed("KeyError: 'x'"), 3: SampleTooLong("no room"), 4: InferenceError("500: no")}

    def behave(example, url):
        if example in failures:
            raise failures[example]

    rows = await rows_of(FakePool(6, behave=behave))
    kinds = {example: row.failure.kind for example, row in rows.items() if row.failure}
    assert kinds == {1: "environment", 3: "overlong", 4: "refused"}
    assert rows[1].failure.message == "KeyError: 'x'"
    assert all(len(rows[example].rollouts) == 2 for example in (0, 2, 5))


async def test_server_that_refuses_everything_ends_the_evaluation():
    def behave(example, url):
        raise InferenceError("401: wrong key")

    pool = FakePool(1000, behave=behave)
    with pytest.raises(RunError, match="8 requests in a row were refused; the last: 401: wrong key"):
        await rows_of(pool, max_concurrent=2)
    assert len(pool.urls) == 8


async def test_examples_of_a_lost_server_move_to_another():
    def behave(example, url):
        if url == "http://a":
            raise InferenceServerLost("gone")

    servers, pool = AnyServer("http://a", "http://b"), FakePool(3, behave=behave)
    rows = await rows_of(pool, servers, max_concurrent=1)
    assert all(row.rollouts for row in rows.values())
    assert servers.lost == ["http://a"]


async def test_each_example_has_a_different_seed():
    pool = FakePool(3)
    await rows_of(pool, seed=7)
    assert sorted(pool.seeds) == [(7, 0), (7, 1), (7, 2)]
    unseeded = FakePool(1)
    await rows_of(unseeded)
    assert unseeded.seeds == [None]


async def test_cancellation_cancels_rollouts_in_flight():
    never = asyncio.Event()

    async def wait(example, url):
        await never.wait()

    pool = FakePool(2, behave=wait)
    task = asyncio.create_task(rows_of(pool))
    await pool.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.in_flight == 0


async def test_rollouts_go_to_the_least_loaded_server():
    servers = FixedServers(["http://a", "http://b"])
    async with servers.acquire(4) as first, servers.acquire(1) as second, servers.acquire(1) as third:
        assert (first, second, third) == ("http://a", "http://b", "http://b")


async def lose(servers):
    """Have the next rollout lose its server; returns which."""
    with pytest.raises(InferenceServerLost):
        async with servers.acquire(1) as url:
            raise InferenceServerLost(f"{url} is gone")
    return url


async def test_lost_server_is_excluded_for_a_while(monkeypatch):
    servers = FixedServers(["http://a", "http://b"])
    assert await lose(servers) == "http://a"
    for _ in range(3):
        async with servers.acquire(1) as url:
            assert url == "http://b"
    monkeypatch.setattr(eval_session, "_EXCLUDED_SECONDS", 0.0)
    again_at_once = FixedServers(["http://a", "http://b"])
    assert [await lose(again_at_once) for _ in range(2)] == ["http://a", "http://a"]


async def test_all_servers_lost_uses_the_first_that_responds():
    async with fake_chat() as fake:
        servers = FixedServers(["http://127.0.0.1:1", fake.url])
        assert {await lose(servers), await lose(servers)} == {"http://127.0.0.1:1", fake.url}
        async with servers.acquire(1) as url:
            assert url == fake.url, "it answers"
    async with servers.acquire(1) as url:
        assert url == fake.url, "it is not asked whether it is there before it is lost again"


async def test_all_servers_unreachable_raises_with_the_resume_hint(monkeypatch):
    monkeypatch.setattr(eval_session, "_RECONNECT_SECONDS", 0.0)
    async with fake_chat() as fake:
        servers = FixedServers([fake.url])
    await lose(servers)
    with pytest.raises(RunError, match="run the same command again to resume"):
        async with servers.acquire(1):
            pass
