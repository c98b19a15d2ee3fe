"""GSM8K: which number of a reply is its answer, where the questions come from, and the reward."""

import json
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import verifiers as vf
from datasets import Dataset
from gsm8k import load_environment
from gsm8k.environment_tools.numbers import final_number, numbers_in
from hypothesis import given
from hypothesis import strategies as st

from .scripted import play, scores

ROWS = str(Path(__file__).parent / "fixtures" / "gsm8k.jsonl")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 18.", "18"),
        ("3 + 4 = 7 apples", "7"),
        ("It costs $1,234.50 in total", "1234.5"),
        ("10 - 3", "3"),
        ("x=-3", "-3"),
        ("10-3", "3"),
        ("(5)-3", "3"),
        ("the change is \u22125 degrees", "-5"),
        ("-$5", "-5"),
        (".5 left", "0.5"),
        ("1,2,3", "3"),
        ("50%", "50"),
        ("**42**", "42"),
        (r"\boxed{18}", "18"),
        (r"\boxed{18} of 20", "18"),
        (r"19 \boxed{\$1{,}234 \text{ dollars}}", "1234"),
        (r"\boxed{18\%}", "18"),
        (r"\boxed{(18)}", "18"),
        (r"\boxed{18.00}", "18"),
        (r"\boxed{18 or 19} and 18", None),
        (r"\boxed{x = 18}", None),
        (r"\boxed{\frac{36}{2}}", None),
        (r"\boxed{}", None),
        (r"<think>17</think> none", None),
        (r"<think>17, so \boxed{18}", None),
        ("17</think> 18", "18"),
        ("\u0661\u0668", None),
        ("B2 a1b v1.2x", None),
        ("", None),
    ],
)
def test_the_box_or_else_the_last_number_is_the_answer(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


@given(
    st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "so ${:,}.", "={}", r"\boxed{{{}}} of 7", "{}.0"])
)
def test_every_way_to_write_a_number_is_read(number: int, form: str) -> None:
    assert final_number(form.format(number)) == number


def test_number_of_a_million_digits_is_unequal_and_fast() -> None:
    start = time.process_time()
    for text in ("9" * 10**6, "1," * 10**6, "-" * 10**6, r"\boxed{" + "9" * 10**6 + "}", "1,000" * 10**5, "$" * 10**6):
        assert final_number(text) != 9
    assert numbers_in("9" * 41)[0].is_nan()
    assert time.process_time() - start < 3


def test_rows_of_a_file_become_questions_with_numbers() -> None:
    env = load_environment(data_path=ROWS)
    rows = env.get_dataset()
    assert rows["answer"] == ["3000", "18", "-5"] == env.get_eval_dataset()["answer"]
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    assert rows[1]["prompt"][1]["content"] == "A ferry takes 18 cars. How many cars cross on one trip?"
    assert len(load_environment(data_path=ROWS, system_prompt="").get_dataset()[0]["prompt"]) == 1


def test_only_the_correct_number_is_rewarded() -> None:
    env = vf.load_environment("gsm8k", data_path=ROWS)
    row = env.get_dataset()[0]
    right = [r"\boxed{3,000}", "3000", "She keeps 3,600 - 600 = 3,000 beads.", r"<think>1</think>\boxed{3000.0}"]
    wrong = [
        "",
        "3001",
        "3000 or 3001",
        r"\boxed{3000} \boxed{1}",
        "the answer",
        " ".join(map(str, range(5000))),
        r"\boxed{" * 4000 + "3000",
        "#### 3000\n#### 1",
        "3,0,0,0",
        "３０００",  # noqa: RUF001
        "NaN",
        "Infinity",
    ]
    assert scores(env, row, right) == [1] * len(right)
    wrong_scores = dict(zip(wrong, scores(env, row, wrong), strict=True))
    # An unclosed box is no box: the last number stands.
    assert wrong_scores.pop(r"\boxed{" * 4000 + "3000") == 1
    assert set(wrong_scores.values()) == {0}
    assert play(env, row, ["none"])["metrics"]["has_answer"] == 0


def test_shuffles_and_counts() -> None:
    def answers(**args: Any) -> list[str]:
        return load_environment(data_path=ROWS, **args).get_dataset()["answer"]

    orders = {tuple(answers(dataset_shuffle=True, seed=seed)) for seed in range(8)}
    assert len(orders) > 2 and answers(dataset_shuffle=True, seed=1) == answers(dataset_shuffle=True, seed=1)
    assert answers(num_train_examples=1) == ["3000"]
    env = load_environment(data_path=ROWS, eval_data_path=ROWS, num_eval_examples=2)
    assert env.get_eval_dataset()["answer"] == ["3000", "18"]
    with pytest.raises(ValueError, match="-1"):
        load_environment(data_path=ROWS, num_train_examples=0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "How many?"}, "no 'answer'"),
        ({"question": "How many?", "answer": "#### 1 or 2"}, "'answer' does not end in '#### number'"),
        ({"question": "How many?", "answer": "some\n#### "}, "'answer' does not end in '#### number'"),
        ({"question": None, "answer": "#### 1"}, "no 'question'"),
    ],
)
def test_malformed_row_raises_with_its_number(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1?", "answer": "1"}\n' + json.dumps(row))
    with pytest.raises(ValueError, match=rf"rows\.jsonl, row 2: {message}"):
        load_environment(data_path=str(tmp_path / "rows.jsonl"))


def test_missing_file_raises_with_its_name() -> None:
    with pytest.raises(ValueError, match=r"there is no file .*absent\.jsonl"):
        load_environment(data_path="absent.jsonl")


def test_the_hub_is_read_for_training_at_once_and_for_evaluation_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, subset: str | None, split: str, cache_dir: None) -> Dataset:
        asked.append((name, subset, split))
        return Dataset.from_list([{"question": "1 + 1?", "answer": "#### 2"}])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    env = load_environment()
    assert asked == [("openai/gsm8k", "main", "train")]
    assert env.get_eval_dataset()["answer"] == ["2"] and asked[1:] == [("openai/gsm8k", "main", "test")]
