"""INTELLECT-2's mathematics: which rows are taken, and that they are graded as mathematics."""

from pathlib import Path
from typing import Any

import pytest
import verifiers as vf
from datasets import Dataset
from intellect_math import load_environment

from .scripted import scores

ROWS = str(Path(__file__).parent / "fixtures" / "intellect.jsonl")


def answers(**args: Any) -> list[str]:
    return load_environment(data_path=ROWS, **args).get_dataset()["answer"]


def test_programs_are_left_out_and_ground_truths_read() -> None:
    assert answers() == ["7", r"\frac{1}{3}", "121"]


def test_solve_rates_bound_how_hard_it_is() -> None:
    assert answers(solve_rate_field="solve_rate", max_solve_rate=0.5) == [r"\frac{1}{3}"]
    assert answers(solve_rate_field="solve_rate", min_solve_rate=0.5) == ["7", r"\frac{1}{3}"]
    assert answers(solve_rate_field="solve_rate") == answers()
    with pytest.raises(ValueError, match="need solve_rate_field"):
        load_environment(data_path=ROWS, min_solve_rate=0.1)
    with pytest.raises(ValueError, match=r"intellect\.jsonl, row 1: no 'rate' to filter by"):
        answers(solve_rate_field="rate", min_solve_rate=0.1)


def test_an_equal_answer_is_rewarded() -> None:
    env = vf.load_environment("intellect_math", data_path=ROWS, num_train_examples=2)
    rows = env.get_dataset()
    assert scores(env, rows[0], [r"\boxed{7}", r"\boxed{7.0}", "7", r"\boxed{8}", ""]) == [1, 1, 0, 0, 0]
    assert scores(env, rows[1], [r"\boxed{\tfrac13}", r"\boxed{0.33}"]) == [1, 0]


def test_evaluation_rows_are_read_from_a_separate_file(tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text('[{"prompt": "0?", "answer": 0}, {"prompt": "5?", "answer": 5}]')
    env = load_environment(data_path=ROWS, eval_data_path=str(tmp_path / "eval.json"), num_eval_examples=1)
    assert env.get_eval_dataset()["answer"] == ["0"]
    assert load_environment(data_path=ROWS).get_eval_dataset()["answer"] == answers()


def test_hub_download_selects_the_mathematical_subset(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, subset: str | None, split: str, cache_dir: None) -> Dataset:
        asked.append((name, subset, split))
        return Dataset.from_list([{"prompt": "1 + 1?", "verification_info": '{"ground_truth": "2"}'}])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert load_environment().get_dataset()["answer"] == ["2"]
    assert asked == [("PrimeIntellect/INTELLECT-2-only-math", None, "train")]


def test_seeds_shuffle() -> None:
    orders = {tuple(answers(dataset_shuffle=True, seed=seed)) for seed in range(8)}
    assert len(orders) > 2 and answers(dataset_shuffle=True, seed=5) == answers(dataset_shuffle=True, seed=5)
