"""The calculator: exact, bounded, never code; its questions; and rollouts with tool calls through verifiers' loop."""

import json
import re
import time
from fractions import Fraction
from itertools import islice
from typing import Any

import pytest
import verifiers as vf
from calculator.arithmetic import MAX_BITS, evaluate, show
from calculator.environment import calculate, final_answer
from calculator.questions import LEVELS, Level, make_questions
from hypothesis import given
from hypothesis import strategies as st

from .scripted import call, play, scores


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"), ("(1 + 2) * 3", "9"), ("-2 ** 2", "-4"), ("2^10", "1024"), ("2 ** -2", "0.25"),
        ("0.1 + 0.2", "0.3"), ("7 // 2", "3"), ("-7 // 2", "-4"), ("-7 % 3", "2"), ("1 / 8", "0.125"),
        ("-1 / 8", "-0.125"), ("22 / 7", "22/7 (about 3.14285714286)"), ("1,234,567 + 1", "1234568"), ("1\n+\n2", "3"),
        (".5 + 1.", "1.5"), ("2 ** 512 / 3", None),
        ("123456789012345678901234567890.1 * 10", "1234567890123456789012345678901"),
    ],
)  # fmt: skip
def test_arithmetic_is_exact(expression: str, value: str | None) -> None:
    assert calculate(expression) == (value or show(Fraction(2**512, 3)))


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"), ("1 % (2 - 2)", "division by zero"), ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "exponent must be"), ("9 ** 0.5", "exponent must be"), ("10 ** 512 ** 2", "exponent must be"),
        ("(2 ** 512) ** 512", "too big"), ("1" * 250 + "**" + "9", "too big"),
        ("*".join(["(10**308)"] * 20), "too big"),
        ("1" * 301, "at most 300"), ("", "only numbers"),
        ("x + 1", "only numbers"), ("__import__('os').system('id')", "only numbers"), ("1e9", "only numbers"),
        ("1 if 1 else 2", "only numbers"), ("1, 2", "only numbers"), ("()", "only numbers"), ("[1]", "only numbers"),
        ("1 @ 2", "only numbers"), ("\uff11 + 1", "only numbers"), ("1\x00", "only numbers"),
        ("1 +", "not an arithmetic"), ("1 2", "not an arithmetic"), ("1(2)", "only numbers"),
        ("." * 300, "not an arithmetic"), ("(" * 300, "not an arithmetic"), ("(" * 149 + "1" + ")" * 149, None),
        ("-" * 299 + "1", None),
    ],
)  # fmt: skip
def test_other_expressions_raise(expression: str, message: str | None) -> None:
    start = time.process_time()
    if message is None:
        assert calculate(expression) in ("1", "-1")
    else:
        with pytest.raises(ValueError, match=message):
            calculate(expression)
    assert time.process_time() - start < 0.5


def test_too_large_power_raises_before_it_is_computed() -> None:
    start = time.process_time()
    for _ in range(300):
        with pytest.raises(ValueError, match="too big"):
            calculate("(10**500 * 10**500) ** 512")
    assert time.process_time() - start < 1


@given(st.text("0123456789.+-*/%() ^,", max_size=40))
def test_every_invalid_expression_raises_value_error(expression: str) -> None:
    try:
        value = evaluate(expression)
    except ValueError:
        return
    assert max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_BITS
    assert show(value)


@pytest.mark.parametrize("level", [*LEVELS.values(), Level("+", 2, 2, 3)])
def test_questions_of_a_level_have_the_value_the_calculator_finds(level: Level) -> None:
    for text, value in islice(make_questions(1, "train", level), 200):
        assert calculate(text) == str(value)
        operations = sum(text.count(f" {operator} ") for operator in "+-*/")
        assert level.min_operations <= operations <= level.max_operations
        assert all(operator not in text or operator in level.operators for operator in "+-*/")
        assert all(1 <= int(number) <= level.max_number for number in re.findall(r"\d+", text))


def environment(**args: Any) -> tuple[Any, Any]:
    """An environment and a question of it, with its answer replaced by 57."""
    env = vf.load_environment("calculator", num_train_examples=2, num_eval_examples=0, **args)
    return env, {**env.get_dataset()[0], "answer": "57"}


def expression(text: str) -> str:
    return json.dumps({"expression": text})


def test_model_gets_the_results_of_all_calls_and_answers() -> None:
    env, row = environment()
    both = call("calculate", expression("(12 + 7) * 3"), "a")
    both["tool_calls"] += call("calculate", expression("2+2"), "b")["tool_calls"]
    state = play(env, row, [both, "<answer>57</answer>"])
    assert state["reward"] == 1
    (tool,) = state["tool_defs"]
    assert tool.name == "calculate" and list(tool.parameters["properties"]) == ["expression"]
    assert state["scripted"].tools == state["tool_defs"]
    results = [(m.role, m.tool_call_id, m.content) for m in state["scripted"].prompts[1][-2:]]
    assert results == [("tool", "a", "57"), ("tool", "b", "4")]
    metrics = state["metrics"]
    assert metrics["total_tool_calls"] == metrics["calculate_calls"] == metrics["num_turns"] == 2
    assert metrics["tool_errors"] == 0 and metrics["has_answer"] == 1


def test_failed_call_returns_an_error_to_the_model_and_the_rollout_continues() -> None:
    env, row = environment(max_turns=9)
    texts = [expression("9**9**9"), "{not json", '{"expr": "1"}', '{"expression": 7}', "[1]", "[" * 100_000]
    bad = [*(call("calculate", text) for text in texts), call("system", expression("1"))]
    state = play(env, row, [*bad, "<answer>57</answer>"])
    results = [message.content for message in state["completion"] if message.role == "tool"]
    assert all(result.startswith("error: ") and len(result) < 250 for result in results)
    assert "exponent" in results[0] and "text" in results[3] and "no such tool" in results[6]
    assert state["metrics"]["tool_errors"] == len(bad) and state["reward"] == 1


RIGHT = [
    *(f"So: <answer>{number}</answer>." for number in (
        "57", " 57 ", "+57", "57.0", "\n57\n", "57.", "$57$", r"\boxed{57}", "**57**", "x = 57", "5.7e1")),
    "<think>maybe <answer>3</answer></think><answer>57</answer>", "<answer>57</answer>, so <answer>57</answer>",
    "<answer>3</answer>, no: <answer>57</answer>", "<answer>57<answer>57</answer>",
]  # fmt: skip
WRONG = [
    "", "57", "<answer>58</answer>", "<answer>57</answer> <answer>58</answer>",
    "<think><answer>57</answer></think>", "<think>57 <answer>57</answer>", "</answer>57<answer>",
    "<answer>114/2</answer>", "<answer>19 * 3 = 57</answer>", "<answer>(12 + 7) * 3</answer>",
    "<answer>5,7</answer>", "<answer>,57</answer>", "<answer>0,057</answer>", "<answer>-57</answer>",
    "<answer>57 million</answer>", "<answer>57 or 58</answer>", "<answer>" + "5" * 5000 + "</answer>",
    "".join(f"<answer>{number}</answer>" for number in range(1000)), "<answer>\u0665\u0667</answer>",
    "<answer>,</answer>", "<answer>nan</answer>", "<answer>19*3</answer>", "<answer></answer>", "<answer>" * 10_000,
]  # fmt: skip


def test_only_the_correct_number_in_the_last_answer_after_the_reasoning_is_rewarded() -> None:
    env, row = environment()
    assert [reply for reply, score in zip(RIGHT, scores(env, row, RIGHT), strict=True) if score != 1] == []
    assert [reply for reply, score in zip(WRONG, scores(env, row, WRONG), strict=True) if score != 0] == []


def test_answer_with_a_call_is_not_final_and_turns_are_limited() -> None:
    env, row = environment(max_turns=2)
    calling = call("calculate", expression("57")) | {"content": "<answer>57</answer>"}
    state = play(env, row, [calling, calling])
    assert state["reward"] == 0 and state["metrics"]["num_turns"] == 2
    assert state["stop_condition"] == "max_turns_reached"
    assert final_answer([]) is None


def test_the_tool_can_be_required() -> None:
    env, row = environment(require_tool=True)
    assert play(env, row, ["<answer>57</answer>"])["reward"] == 0
    failed = call("calculate", expression("1/0"))
    assert play(env, row, [failed, "<answer>57</answer>"])["reward"] == 0
    assert play(env, row, [call("calculate", expression("57")), "<answer>57</answer>"])["reward"] == 1
