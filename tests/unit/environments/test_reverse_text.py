"""The reverse-text environment: its examples, its reward, and what it measures beside it."""

import asyncio
import string
from itertools import islice, product
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from reverse_text import load_environment, scores
from reverse_text.words import make_words
from verifiers.types import State


def lcs_by_enumeration(a: str, b: str) -> int:
    """The definition: the longest string that both contain as a subsequence."""

    def subsequences(text: str) -> set[str]:
        picks = product((False, True), repeat=len(text))
        return {"".join(c for c, kept in zip(text, pick, strict=True) if kept) for pick in picks}

    return max(len(s) for s in subsequences(a) & subsequences(b))


SHORT = st.text("abc", max_size=6)


@given(SHORT, SHORT)
def test_lcs_length_is_that_of_the_definition(a: str, b: str) -> None:
    assert scores.lcs_length(a, b) == scores.lcs_length(b, a) == lcs_by_enumeration(a, b)


def test_scores_distinguish_order_letters_and_length() -> None:
    def table(answer: str, completion: str) -> list[float]:
        functions = (scores.lcs_ratio, scores.exact_match, scores.letter_overlap, scores.length_match)
        return [f(answer, completion) for f in functions]

    assert table("cba", "cba") == [1, 1, 1, 1]
    assert table("cba", "abc") == [pytest.approx(1 / 3), 0, 1, 1]  # copied: all letters, wrong order
    assert table("cba", "cb") == [pytest.approx(4 / 5), 0, pytest.approx(4 / 5), 0]
    assert table("cba", "xyz") == [0, 0, 0, 1]
    assert table("cba", "") == [0, 0, 0, 0]
    assert table("", "") == [1, 1, 1, 1]


def test_words_depend_only_on_the_seed_and_have_every_length() -> None:
    words = list(islice(make_words("a", 3, 5), 3000))
    assert all(800 < sum(len(word) == n for word in words) < 1200 for n in (3, 4, 5))
    assert {letter for word in words for letter in word} == set(string.ascii_lowercase)
    assert words[:50] != list(islice(make_words("b", 3, 5), 50))
    assert list(islice(make_words(7, 2, 9), 4)) == ["atd", "udoqnb", "sgbyrnwvs", "ttc"], "as in any other process"


def test_made_words_are_bare_prompts_with_their_reversals() -> None:
    env = load_environment(words=200, seed=3, eval_examples=10)
    rows = env.get_dataset()
    assert len(rows) == 200 and len(env.get_eval_dataset()) == 10
    for row in rows:
        (message,) = row["prompt"]
        assert message["role"] == "user" and message["content"][::-1] == row["answer"]


def test_the_hub_data_set_asks_for_a_tag_and_keeps_its_last_rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, split: str) -> Dataset:
        asked.append((name, split))
        return Dataset.from_dict({"prompt": [f"text {i}" for i in range(10)]})

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    env = load_environment(eval_examples=3)
    assert asked == [("PrimeIntellect/Reverse-Text-RL", "train")]
    system, user = env.get_dataset()[0]["prompt"]
    assert system["role"] == "system" and "<reversed_text>" in system["content"]
    assert user == {"role": "user", "content": "text 0"} and env.get_dataset()[0]["answer"] == "0 txet"
    assert env.get_dataset()["answer"] == [f"{i} txet" for i in range(7)]
    assert env.get_eval_dataset()["answer"] == [f"{i} txet" for i in range(7, 10)]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: Dataset.from_dict({"text": ["a"]}))
    with pytest.raises(ValueError, match="no column `prompt`, only text"):
        load_environment()


def score(env: Any, answer: str, completion: str) -> dict[str, Any]:
    """Score one finished rollout as the orchestrator does."""
    message = {"role": "assistant", "content": completion}
    state = State(env.get_dataset()[0] | {"answer": answer, "completion": [message], "trajectory": [], "timing": None})
    asyncio.run(env.rubric.score_group([state]))
    return state


@pytest.mark.parametrize(("completion", "reward"), [("olleh", 1.0), ("olle", 8 / 9), ("hello", 0.4), ("", 0.0)])
def test_only_the_subsequence_ratio_is_rewarded(completion: str, reward: float) -> None:
    state = score(load_environment(words=1), "olleh", completion)
    assert state["reward"] == pytest.approx(reward)
    assert state["metrics"]["lcs_ratio"] == pytest.approx(reward)
    assert state["metrics"]["exact_match"] == (completion == "olleh")
    assert {"letter_overlap", "length_match"} <= state["metrics"].keys()


def test_only_text_inside_the_tag_counts() -> None:
    env = load_environment(words=1, tag="answer")
    thought = "<think>x</think>\n<answer>\ncba\n</answer> so"
    for completion, reward in (("<answer>cba</answer>", 1), (thought, 1), ("cba", 0), ("<answer>cba", 0)):
        assert score(env, "cba", completion)["reward"] == reward
    assert "<answer>" in env.get_dataset()[0]["prompt"][0]["content"]
