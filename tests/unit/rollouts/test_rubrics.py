"""What a reward function that fails means: a failure of its rollout, a 0, or a metric less."""

import re

import pytest
import verifiers as vf

from prime_rl.rollouts.group_attempts import EnvironmentFailed
from prime_rl.rollouts.verifiers.rubrics import patch_verifiers, reward_weights, score_group

patch_verifiers()


def make_states(count):
    return [{"prompt": [], "completion": [], "answer": str(i), "trajectory": []} for i in range(count)]


def picky(answer, **kwargs):
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

    def takes_all(**objects):
        seen["all"] = objects
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
