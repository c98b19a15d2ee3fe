"""The patches of verifiers that save CPU time; test_rubrics.py shows that they change no result."""

import asyncio
import gc
from weakref import WeakKeyDictionary

import pytest
import verifiers as vf
from datasets import Dataset

from prime_rl.rollouts import environment_backend
from prime_rl.rollouts.verifiers import rubrics
from prime_rl.rollouts.verifiers.classic_client import RolloutClient
from tests.unit.rollouts.conftest import RUN, NumberingEngine

DATA = Dataset.from_list([{"question": "say it", "answer": "1", "info": {"list": [1]}}])


def plain(answer):
    return 10 * float(answer)


async def test_group_reads_signatures_once_and_needs_no_thread_and_no_deep_copy(load_classic, monkeypatch):
    environment = load_classic(vf.SingleTurnEnv(dataset=DATA, rubric=vf.Rubric(funcs=[plain])))
    for cache in ("_of_functions", "_of_methods"):  # other tests in this process have filled them
        monkeypatch.setattr(environment_backend, cache, WeakKeyDictionary())
    read, read_now = [], environment_backend._read
    monkeypatch.setattr(environment_backend, "_read", lambda func: read.append(func) or read_now(func))
    monkeypatch.setattr(asyncio, "to_thread", None)
    monkeypatch.setattr(rubrics, "deepcopy", None)
    for _ in range(2):
        rollouts = await environment.run_group(0, 3, NumberingEngine(), RUN, 256)
        assert [rollout.reward for rollout in rollouts] == [10.0] * 3
    assert read and len({getattr(func, "__func__", func) for func in read}) == len(read), "one is read twice"


async def test_scoring_with_functions_that_never_wait_creates_no_task():
    async def at_once(answer):
        return float(answer)

    def joint(states):
        return [100.0] * len(states)

    loop, created = asyncio.get_running_loop(), []
    loop.set_task_factory(lambda loop, coro, **options: created.append(coro) or asyncio.Task(coro, loop=loop))
    states = [{"prompt": [], "completion": [], "answer": str(i), "trajectory": []} for i in range(3)]
    assert await rubrics.score_group(vf.Rubric(funcs=[at_once, plain, joint]), states) == {}
    loop.set_task_factory(None)
    assert [state["reward"] for state in states] == [100.0, 111.0, 122.0]
    assert created == []


@pytest.mark.extended
async def test_finished_rollouts_are_freed_without_the_garbage_collector(load_classic):
    def clients():
        return [one for one in gc.get_objects() if type(one) is RolloutClient]

    environment = load_classic(vf.SingleTurnEnv(dataset=DATA, rubric=vf.Rubric(funcs=[plain])))
    await environment.run_group(0, 3, NumberingEngine(), RUN, 256)
    gc.collect()
    gc.disable()
    try:
        earlier = clients()  # an earlier test's error may hold one
        rollouts = await asyncio.create_task(environment.run_group(0, 3, NumberingEngine(), RUN, 256))
        await asyncio.sleep(0)
        assert len(rollouts) == 3
        assert [client for client in clients() if not any(client is one for one in earlier)] == []
    finally:
        gc.enable()
