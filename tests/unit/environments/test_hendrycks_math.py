"""Hendrycks MATH: rows of several shapes, filters, and rewards for replies of every kind."""

from pathlib import Path

import pytest
import verifiers as vf
from hendrycks_math import load_environment

from .scripted import play, scores

ROWS = str(Path(__file__).parent / "fixtures" / "math.jsonl")


def test_rows_give_questions_and_boxed_or_plain_answers() -> None:
    env = load_environment(data_path=ROWS)
    rows = env.get_dataset()
    assert rows["answer"] == ["10", r"\frac{1}{2}", r"\{1, 2\}", r"2\sqrt{3}"]
    system, user = rows[0]["prompt"]
    assert system["role"] == "system" and "\\boxed" in system["content"]
    assert user == {"role": "user", "content": "A square has area 50. How long is its diagonal?"}
    assert env.get_eval_dataset()["answer"] == rows["answer"]  # offline: nothing of the hub
    assert [
        message["role"] for message in load_environment(data_path=ROWS, system_prompt="").get_dataset()[0]["prompt"]
    ] == ["user"]


def test_only_one_correct_box_is_rewarded() -> None:
    env = vf.load_environment("hendrycks-math", data_path=ROWS, grading={"seconds": 1})
    row = env.get_dataset()[1]
    completions = {
        r"Clearly \boxed{\frac{1}{2}}.": 1,
        r"\boxed{0.5}": 1,
        r"<think>\boxed{3}</think> It is \boxed{\dfrac12}": 1,
        r"\boxed{3} no, \boxed{x = 1/2}": 1,
        "": 0,
        "1/2": 0,
        r"\boxed{}": 0,
        r"\boxed{1/2": 0,
        r"<think>\boxed{1/2}": 0,
        r"\boxed{1/2} \boxed{3}": 0,
        " ".join(rf"\boxed{{{n}/2}}" for n in range(3000)): 0,
        r"\boxed{" + ", ".join(f"{n}/2" for n in range(60)) + "}": 0,
        r"\boxed{\frac{1}{2}" + " " * 3000 + "}": 1,  # outer space is not part of an answer
        r"\boxed{" + "1/2+" * 600 + "0}": 0,
        r"\boxed{9^{9^{9^{9}}}}": 0,
        "\ufeff\u202e" * 5000 + "\\boxed{\u0660.\u0665}": 0,
        r"</think>" * 2000 + r"answer: \boxed{\boxed{\boxed{1/2}}}": 1,
    }
    assert scores(env, row, list(completions)) == list(completions.values())


def test_metrics_distinguish_missing_from_ungradable_answers() -> None:
    env = load_environment(data_path=ROWS, grading={"seconds": 1, "max_chars": 50})
    row = env.get_dataset()[0]
    names = ("correct_answer", "has_answer", "grading_failed")

    def metrics(completion: str) -> list[float]:
        return [play(env, row, [completion])["metrics"][name] for name in names]

    assert metrics(r"\boxed{10.0}") == [1, 1, 0]
    assert metrics(r"\boxed{11}") == [0, 1, 0]
    assert metrics("10") == [0, 0, 0]
    assert metrics(r"\boxed{9^{9^{9^{9}}}}") == [0, 1, 1]
    assert metrics(rf"\boxed{{{'1+' * 40}1}}") == [0, 1, 1]


def test_difficulty_filters_skip_rows_without_difficulty() -> None:
    def levels(**bounds: float) -> list[str]:
        return load_environment(data_path=ROWS, **bounds).get_dataset()["answer"]  # type: ignore[arg-type]

    assert levels(min_difficulty=2) == ["10", r"\{1, 2\}"]
    assert levels(max_difficulty=2) == ["10", r"\frac{1}{2}"]
    assert levels(min_difficulty=2, max_difficulty=3) == ["10"]
    with pytest.raises(ValueError, match="filters leave no row"):
        levels(min_difficulty=6)
    with pytest.raises(ValueError, match=r"math\.jsonl, row 1: no 'hardness' to filter by"):
        load_environment(data_path=ROWS, difficulty_key="hardness", min_difficulty=1)
