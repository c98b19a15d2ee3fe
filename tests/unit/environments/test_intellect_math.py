"""INTELLECT-2's mathematics: which rows are taken."""

from pathlib import Path
from typing import Any

import pytest
from intellect_math import load_environment

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
