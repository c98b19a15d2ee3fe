"""What a reward function that fails means: a failure of its rollout, a 0, or a metric less; how functions wait."""

import asyncio
import re
import time

import pytest
import verifiers as vf
from datasets import Dataset

from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.group_attempts import EnvironmentFailed
from prime_rl.rollouts.verifiers import rubrics
from prime_rl.rollouts.verifiers.rubrics import has_cleanup, patch_verifiers, reward_weights, score_group

patch_verifiers()


def make_states(count):
    return [{"prompt": [], "completion": [], "answer": str(i), "trajectory": []} for i in range(count)]


async def picky(answer, **kwargs):
    if answer == "1":
        raise KeyError("broken")
    return 1.0


def unreachable(answer, **kwargs):
    if answer == "1":
        raise ConnectionError("the judge is down")
    return 1.0


def ranks(states, **kwargs):
    raise KeyError("broken")


async def test_reward_failure_of_one_state_does_not_affect_the_others():
    states = make_states(3)
    failures = await score_group(vf.Rubric(funcs=[picky]), states)
    assert {index: str(failure) for index, failure in failures.items()} == {
        1: "reward function picky raised KeyError: 'broken' "
        '(env.reward_errors = "zero" counts it as 0, as verifiers does)'
    }
    assert not failures[1].is_infrastructure
    assert [states[0]["reward"], states[2]["reward"]] == [1.0, 1.0]


async def test_reward_failure_counts_0_if_configured_except_for_infrastructure():
    states = make_states(3)
    assert await score_group(vf.Rubric(funcs=[picky]), states, zero=True) == {}
    assert [state["reward"] for state in states] == [1.0, 0.0, 1.0]
    assert [state["metrics"]["reward_errors"] for state in states] == [0, 1, 0]
    failures = await score_group(vf.Rubric(funcs=[unreachable]), make_states(3), zero=True)
    assert [*failures] == [1]
    assert failures[1].is_infrastructure and "reward_errors" not in str(failures[1])


async def test_failed_metric_is_missing_and_logs_a_warning():
    def constant(**kwargs):
        return 1.0

    rubric, states, warnings = vf.Rubric(funcs=[constant]), make_states(3), []
    rubric.add_metric(picky)
    rubric.add_metric(ranks)
    assert await score_group(rubric, states, warn=lambda *warning: warnings.append(warning)) == {}
    assert [state["reward"] for state in states] == [1.0] * 3
    assert [sorted(state["metrics"]) for state in states] == [
        ["constant", "picky"], ["constant"], ["constant", "picky"],
    ]  # fmt: skip
    assert [topic for topic, _ in warnings] == ["metric picky", "metric ranks"]
    assert "weight 0, so only its metric is missing" in warnings[0][1]


async def test_numbers_of_a_dictionary_are_reward_and_metrics():
    def measured(answer):
        return {"accepted": True, "score/form": 0.5}

    def scored(answer):
        return {"reward": 0.75, "score": 2, "length": len(answer)}

    async def only_scored(answer):
        return {"score": 0.25}

    rubric, states = vf.Rubric(funcs=[measured, scored, only_scored], weights=[0.0, 2.0, 1.0]), make_states(2)
    assert await score_group(rubric, states) == {}
    assert [state["reward"] for state in states] == [1.75, 1.75]
    assert states[0]["metrics"] == {
        "measured/accepted": 1.0, "measured/score/form": 0.5,
        "scored": 0.75, "scored/score": 2.0, "scored/length": 1.0, "only_scored": 0.25,
    }  # fmt: skip
    assert states[0]["metrics"] == states[1]["metrics"]


@pytest.mark.parametrize(
    "value, weight, message",
    [
        ({"accepted": 1.0}, 1.0, r"function measured returned a dictionary without 'reward' or 'score' \(its keys are "
         r"\['accepted'\]\); return one of them, or set weight 0 to record metrics only"),
        ({"reward": 1.0, "accepted": "yes"}, 1.0, "'accepted' of reward function measured is 'yes', not a number"),
        ({"reward": float("nan")}, 1.0, "'reward' of reward function measured is nan, not a finite number"),
        ({"accepted": None}, 0.0, "'accepted' of reward function measured is None, not a number"),
    ],
    ids=["no reward", "text", "nan", "none"],
)  # fmt: skip
async def test_dictionary_of_another_form_is_refused_by_name(value, weight, message):
    def measured(answer):
        return value

    warnings = []
    states = make_states(1)
    failures = await score_group(
        vf.Rubric(funcs=[measured], weights=[weight]), states, warn=lambda *warning: warnings.append(warning[1])
    )
    (found,) = [*map(str, failures.values()), *warnings]
    assert re.search(message, found)
    if not failures:  # only the metric is missing
        assert states[0]["reward"] == weight
        assert states[0]["metrics"] == ({"measured": 1.0} if weight else {})


async def test_group_reward_failure_fails_the_group():
    with pytest.raises(EnvironmentFailed, match="reward function ranks raised KeyError"):
        await score_group(vf.Rubric(funcs=[ranks]), make_states(2))
    states = make_states(2)
    assert await score_group(vf.Rubric(funcs=[ranks]), states, zero=True) == {}
    assert [state["reward"] for state in states] == [0.0, 0.0]


@pytest.mark.parametrize("has_provider", [True, False])
async def test_reward_functions_get_the_objects_of_verifiers(has_provider):
    """Also if a rubric provides other objects under the names of a state's."""
    seen = {}

    def takes_some(completion, answer, info, state):
        seen["some"] = {"completion": completion, "answer": answer, "info": info, "state": state}
        return 1.0

    def takes_all(**info):
        """Its parameter has the name of an object, which is not what it gets."""
        seen["all"] = info
        return 1.0

    def takes_a_column(answer, column):
        seen["column"] = column
        return 1.0

    rubric = vf.Rubric(funcs=[takes_some, takes_all, takes_a_column])
    if has_provider:
        rubric.score_object_providers.append(lambda state: {"answer": "provided"})
    else:
        rubric.add_class_object("info", "of the class")
    state = vf.State(input={"prompt": [], "answer": "1", "column": 5})
    state |= {"completion": ["word"], "trajectory": []}
    expected = rubric.score_objects(state)
    assert await score_group(rubric, [state]) == {}
    assert seen["some"] == {name: expected[name] for name in ("completion", "answer", "info", "state")}
    assert seen["some"]["answer"] == ("provided" if has_provider else "1")
    assert seen["some"]["info"] == ({} if has_provider else "of the class")
    assert seen["all"] == expected
    assert seen["column"] == 5


def test_weights_of_functions_with_one_name_are_left_out():
    def first(completion): ...
    def second(completion): ...

    both = vf.Rubric(funcs=[first, second, first], weights=[0.5, -2.0, 1.0])
    assert reward_weights(both) == {"second": -2.0}
    assert reward_weights(vf.RubricGroup([vf.Rubric(funcs=[first]), vf.Rubric(funcs=[first, second])])) == {
        "second": 1.0
    }


# The patches of verifiers, which save time and change no result


def waits(barrier):
    async def reward(answer):
        await barrier.wait()
        return float(answer)

    return reward


def waits_later(barrier):
    return lambda answer: waits(barrier)(answer)


def waits_in_comprehension(barrier):
    async def reward(answer):
        return sum([float(answer) for _ in range(1) if await barrier.wait() >= 0])

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


async def test_reward_functions_that_wait_run_at_the_same_time():
    async def at_once(answer):
        return 10 * float(answer)

    kinds = (waits, waits_later, waits_in_comprehension, waits_in_async_generator, waits_in_async_with)
    states = make_states(3)
    async with asyncio.timeout(30):
        rubric = vf.Rubric(funcs=[at_once, *(make(asyncio.Barrier(3)) for make in kinds)])
        assert await score_group(rubric, states) == {}
    assert [state["reward"] for state in states] == [0.0, 15.0, 30.0]


async def test_cancelled_scoring_cancels_the_functions_that_wait():
    waiting, ended = asyncio.Event(), []

    async def waits_for_ever(answer):
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            ended.append(answer)

    def slow(answer):
        return time.sleep(2 * rubrics._TURN_SECONDS) or waits_for_ever(answer)

    task = asyncio.create_task(score_group(vf.Rubric(funcs=[slow]), make_states(3)))
    async with asyncio.timeout(30):
        await waiting.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while not ended:
            await asyncio.sleep(0)
    assert task.cancelled() and asyncio.all_tasks() == {asyncio.current_task()}


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


async def test_states_of_a_group_do_not_share_their_input(play_classic):
    seen = []

    def fine(info):
        info["seen"] = True
        seen.append(info)
        return 1.0

    rows = [{"question": "say it", "answer": "", "info": {"list": [1]}}]
    await play_classic(vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[fine])), count=3)
    assert seen == [{"list": [1], "seen": True}] * 3
    assert len({id(info) for info in seen}) == len({id(info["list"]) for info in seen}) == 3


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
