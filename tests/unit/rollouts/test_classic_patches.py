"""The patches of verifiers: they save CPU time and change no result."""

import asyncio
import gc
import time
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import verifiers as vf
from datasets import Dataset

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts import environment_backend
from prime_rl.rollouts.group_attempts import ZERO_HINT
from prime_rl.rollouts.rendering.messages import Generation
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.verifiers import rubrics
from prime_rl.rollouts.verifiers.classic_client import RolloutClient
from prime_rl.rollouts.verifiers.rubrics import has_cleanup, score_group
from prime_rl.rollouts.workers import worker_main
from tests.support.tiny_model import make_tokenizer

rubrics.patch_verifiers()


class StubEngine:
    async def generate(self, prompt_ids, sampling):
        await asyncio.sleep(0)
        ids = np.array([5, 6, 2], np.int32)
        return Generation(ids, np.zeros(3, np.float32), np.zeros(3, np.int32), False)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A single-turn environment whose reward function is a plain function."""
    module = "from tests.unit.rollouts.test_classic_patches import make_environment as load_environment\n"
    (tmp_path / "patched_environment.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    return worker_main.load(EnvConfig(id="patched-environment"), Renderer(make_tokenizer()), "train")


def make_environment():
    def fine(answer, info):
        info["seen"] = True
        return float(answer)

    rows = [{"question": f"say {i}", "answer": str(i), "info": {"list": [1]}} for i in range(2)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[fine]))


def make_states(count):
    return [{"prompt": [], "completion": [], "answer": str(i), "trajectory": []} for i in range(count)]


async def run(environment, count=3):
    return await environment.run_group(1, count, StubEngine(), {"max_tokens": 9}, 256)


async def test_signatures_are_read_once_for_all_rollouts(environment, monkeypatch):
    for cache in ("_of_functions", "_of_methods"):  # other tests in this process have filled them
        monkeypatch.setattr(environment_backend, cache, WeakKeyDictionary())
    read, read_now = [], environment_backend._read
    monkeypatch.setattr(environment_backend, "_read", lambda func: read.append(func) or read_now(func))
    await run(environment)
    assert read
    assert len({getattr(func, "__func__", func) for func in read}) == len(read), "one is read twice"
    read.clear()
    assert (await run(environment))[0].reward == 1.0
    assert read == []


async def test_reward_functions_that_wait_run_at_the_same_time():
    barrier = asyncio.Barrier(3)

    async def together(answer):
        await barrier.wait()
        return float(answer)

    async def at_once(answer):
        return 10 * float(answer)

    def later(answer):
        return together(answer)

    states = make_states(3)
    async with asyncio.timeout(30):
        assert await score_group(vf.Rubric(funcs=[together, at_once, later]), states) == {}
    assert [state["reward"] for state in states] == [0.0, 12.0, 24.0]


async def test_scoring_with_functions_that_never_wait_creates_no_task():
    async def at_once(answer):
        return float(answer)

    def plain(answer):
        return 10 * float(answer)

    def joint(states):
        return [100.0] * len(states)

    loop, created = asyncio.get_running_loop(), []
    loop.set_task_factory(lambda loop, coro, **options: created.append(coro) or asyncio.Task(coro, loop=loop))
    states = make_states(3)
    assert await score_group(vf.Rubric(funcs=[at_once, plain, joint]), states) == {}
    loop.set_task_factory(None)
    assert [state["reward"] for state in states] == [100.0, 111.0, 122.0]
    assert created == []


def waits_in_comprehension(barrier):
    async def reward(answer):
        return sum([float(answer) for _ in range(1) if await barrier.wait() >= 0])

    return reward


def waits_in_nested_comprehension(barrier):
    async def reward(answer):
        return sum([sum([await barrier.wait() * 0 + float(answer) for _ in range(1)]) for _ in range(1)])

    return reward


def waits_in_async_generator(barrier):
    async def values():
        await barrier.wait()
        yield 1

    async def reward(answer):
        return sum([float(answer) * value async for value in values()])

    return reward


def waits_in_async_with(barrier):
    async def reward(answer):
        async with barrier:
            return float(answer)

    return reward


@pytest.mark.parametrize(
    "make", [waits_in_comprehension, waits_in_nested_comprehension, waits_in_async_generator, waits_in_async_with]
)
async def test_function_with_a_hidden_await_waits_beside_the_others(make):
    states = make_states(3)
    async with asyncio.timeout(30):
        assert await score_group(vf.Rubric(funcs=[make(asyncio.Barrier(3))]), states) == {}
    assert [state["reward"] for state in states] == [0.0, 1.0, 2.0]


async def test_function_that_takes_everything_gets_everything_whatever_its_parameter_is_called():
    def count(**info):
        return float({"state", "prompt", "completion", "answer", "info"} <= info.keys())

    states = make_states(2)
    assert await score_group(vf.Rubric(funcs=[count]), states) == {}
    assert [state["reward"] for state in states] == [1.0, 1.0]


async def test_cancelled_scoring_cancels_the_functions_that_wait():
    waiting, ended = asyncio.Event(), []

    async def waits(answer):
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            ended.append(answer)

    def slow(answer):
        return time.sleep(2 * rubrics._TURN_SECONDS) or waits(answer)

    task = asyncio.create_task(score_group(vf.Rubric(funcs=[slow]), make_states(3)))
    async with asyncio.timeout(30):
        await waiting.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while not ended:
            await asyncio.sleep(0)
    assert task.cancelled() and asyncio.all_tasks() == {asyncio.current_task()}


async def test_failing_function_without_await_is_a_failure_of_its_state():
    async def picky(answer):
        return 1 / int(answer)

    failures = await score_group(vf.Rubric(funcs=[picky]), make_states(2))
    assert {index: str(failure) for index, failure in failures.items()} == {
        0: f"reward function picky raised ZeroDivisionError: division by zero {ZERO_HINT}"
    }


class Tasking(vf.Rubric):
    """Makes tasks of its reward calls."""

    async def score_group(self, states):
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(self._call_individual_reward_func(self.funcs[0], state)) for state in states]
            ranks = tasks.create_task(self._call_group_reward_func(self.funcs[1], states))
        for state, call, rank in zip(states, calls, ranks.result(), strict=True):
            state["reward"], state["metrics"] = call.result() + rank, {}


async def test_rubric_that_makes_tasks_of_its_reward_calls_scores():
    def picky(answer):
        return 1 / int(answer)

    def ranks(states):
        return [10.0 * index for index in range(len(states))]

    states = make_states(3)
    failures = await score_group(Tasking(funcs=[picky, ranks]), states)
    assert [*failures] == [0]
    assert [state["reward"] for state in states] == [0, 11, 20.5]


async def test_tokens_are_parsed_without_a_thread(environment, monkeypatch):
    def refuse(*args):
        raise AssertionError("a thread is used")

    monkeypatch.setattr(asyncio, "to_thread", refuse)
    assert len(await run(environment)) == 3


@pytest.mark.extended
async def test_finished_rollouts_are_freed_without_the_garbage_collector(environment):
    def clients():
        return [one for one in gc.get_objects() if type(one) is RolloutClient]

    await run(environment)
    gc.collect()
    gc.disable()
    try:
        earlier = clients()  # an earlier test's error may hold one
        rollouts = await asyncio.create_task(run(environment))
        await asyncio.sleep(0)
        assert len(rollouts) == 3
        assert [client for client in clients() if not any(client is one for one in earlier)] == []
    finally:
        gc.enable()


async def test_states_of_a_group_do_not_share_their_input(environment):
    seen = []
    environment._env.rubric.add_metric(lambda state: seen.append(state["info"]) or 0.0)
    await run(environment)
    assert seen == [{"list": [1], "seen": True}] * 3
    assert len({id(info) for info in seen}) == len({id(info["list"]) for info in seen}) == 3


def test_copy_of_plain_values_equals_a_deep_copy():
    value = {"a": [1, {"b": None, "c": (1, [2])}], "d": np.arange(3), "e": {1: [2]}}
    copied = rubrics.copy_plain(value)
    assert copied["a"] == value["a"]
    assert copied["e"] == value["e"]
    assert copied["d"].tolist() == [0, 1, 2]
    assert copied["a"][1]["c"][1] is not value["a"][1]["c"][1]
    assert copied["d"] is not value["d"]
    assert copied["e"][1] is not value["e"][1]


def test_signatures_of_methods_partials_and_objects_equal_those_of_inspect():
    class Scorer:
        def method(self, answer, *, info=None):
            return 0.0

        def __call__(self, completion, **kwargs):
            return 0.0

    scorer = Scorer()
    for func, names in (
        (Scorer.method, {"self", "answer", "info"}),
        (scorer.method, {"answer", "info"}),
        (Scorer().method, {"answer", "info"}),
        (partial(scorer.method, answer=1), {"answer", "info"}),
        (scorer, {"completion", "kwargs"}),
    ):
        assert environment_backend.call_parameters(func).names == names
    assert environment_backend.call_parameters(scorer).takes_all
    assert environment_backend.call_parameters(scorer.method).select({"answer": 1, "state": 2}) == {"answer": 1}


def test_rubric_with_a_cleanup_handler_has_cleanup():
    class Cleaning(vf.Rubric):
        @vf.cleanup
        async def release(self, state):
            pass

    class Own(vf.Rubric):
        async def cleanup(self, state):
            pass

    plain = vf.Rubric(funcs=[])
    assert not has_cleanup(vf.RubricGroup([plain, plain]))
    assert has_cleanup(vf.RubricGroup([plain, Cleaning()]))
    assert has_cleanup(Own())


def test_another_release_raises_config_error(monkeypatch):
    monkeypatch.setattr(rubrics, "version", lambda name: "0.3.3")
    monkeypatch.delattr(vf.Rubric, "_prime_rl_patched")
    with pytest.raises(ConfigError, match=r"need verifiers 0\.3\.2\.dev22, but the installed release is 0\.3\.3; run"):
        rubrics.patch_verifiers()
