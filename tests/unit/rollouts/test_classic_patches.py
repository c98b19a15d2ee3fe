"""The patches of verifiers: they save CPU time and change no result."""

import asyncio
import gc
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import verifiers as vf
from datasets import Dataset

from prime_rl.configs.shared.blocks import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.environments import environment_loader
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.replies import Generation
from prime_rl.rollouts.verifiers import classic_patches, signatures
from prime_rl.rollouts.verifiers.classic_client import RolloutClient
from prime_rl.rollouts.verifiers.rubrics import has_cleanup, score_group
from tests.support.tiny_model import make_tokenizer

classic_patches.apply()


class StubEngine:
    async def generate(self, prompt_ids, sampling):
        await asyncio.sleep(0)
        ids = np.array([5, 6, 2], np.int32)
        return Generation(ids, np.zeros(3, np.float32), np.zeros(3, np.int32), False)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A single-turn environment whose reward function is a plain function."""
    monkeypatch.setattr(vf, "load_environment", lambda name: make_environment())
    (tmp_path / "patched_environment.py").write_text("def load_environment(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return environment_loader.load(EnvConfig(id="patched-environment"), Renderer(make_tokenizer()), "train")


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


async def count_tasks(awaitable):
    """Return how many tasks are created while `awaitable` runs."""
    loop, created = asyncio.get_running_loop(), []

    def make(loop, coroutine, **options):
        created.append(coroutine)
        return asyncio.Task(coroutine, loop=loop, **options)

    loop.set_task_factory(make)
    try:
        await awaitable
    finally:
        loop.set_task_factory(None)
    return len(created)


async def test_signatures_are_read_once_for_all_rollouts(environment, monkeypatch):
    for cache in ("_of_functions", "_of_methods"):  # other tests in this process have filled them
        monkeypatch.setattr(signatures, cache, WeakKeyDictionary())
    read, read_now = [], signatures._read
    monkeypatch.setattr(signatures, "_read", lambda func: read.append(func) or read_now(func))
    await run(environment)
    assert read
    assert len({getattr(func, "__func__", func) for func in read}) == len(read), "one is read twice"
    read.clear()
    assert (await run(environment))[0].reward == 1.0
    assert read == []


async def test_rollout_needs_one_task(environment):
    await run(environment, count=1)
    assert await count_tasks(run(environment, count=8)) == 8


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
    assert await count_tasks(score_group(vf.Rubric(funcs=[together, at_once, later]), states)) == 6
    assert [state["reward"] for state in states] == [0.0, 12.0, 24.0]


async def test_failing_function_without_await_is_a_failure_of_its_state():
    async def picky(answer):
        return 1 / int(answer)

    failures = await score_group(vf.Rubric(funcs=[picky]), make_states(2))
    assert {index: str(failure) for index, failure in failures.items()} == {
        0: "reward function picky raised ZeroDivisionError: division by zero"
    }


async def test_tokens_are_parsed_without_a_thread(environment, monkeypatch):
    def refuse(*args):
        raise AssertionError("a thread is used")

    monkeypatch.setattr(asyncio, "to_thread", refuse)
    assert len(await run(environment)) == 3


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
    copied = classic_patches.copy_plain(value)
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
        assert signatures.call_parameters(func).names == names
    assert signatures.call_parameters(scorer).takes_all
    assert signatures.call_parameters(scorer.method).select({"answer": 1, "state": 2}) == {"answer": 1}


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
    monkeypatch.setattr(classic_patches, "version", lambda name: "0.3.3")
    monkeypatch.delattr(vf.Rubric, "_prime_rl_patched")
    with pytest.raises(ConfigError, match=r"need verifiers 0\.3\.2\.dev22, but the installed release is 0\.3\.3; run"):
        classic_patches.apply()
