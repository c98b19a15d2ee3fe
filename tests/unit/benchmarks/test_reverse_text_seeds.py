"""Figures and limits of the reverse_text benchmark."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks/reverse_text_seeds.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reverse_text_seeds", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GREEDY = {"lcs_ratio": 0.9, "exact_match": 0.75}


def steps(rewards: list[float], staleness: list[float]) -> list[dict[str, float]]:
    same = ("metrics/exact_match", "metrics/letter_overlap", "metrics/length_match")
    return [
        {"step": i, "reward/mean": reward, "staleness/max": age, **dict.fromkeys(same, reward / 2)}
        for i, (reward, age) in enumerate(zip(rewards, staleness, strict=True))
    ]


def run(benchmark: ModuleType, rewards: list[float], staleness: int, **figures: float) -> dict[str, Any]:
    summary = benchmark.summarise(steps(rewards, [0, staleness, *[0] * (len(rewards) - 2)]))
    return {"async_level": 2, "seed": 0, "seconds": 100.0, "greedy": GREEDY, **summary, **figures}


RISING = [0.3, 0.4, 0.5, 0.6, 0.95, 0.96, 0.97, 0.98, 0.99]


def test_ends_are_the_first_three_and_the_last_five_steps(benchmark: ModuleType) -> None:
    result = run(benchmark, RISING, 2)
    assert result["reward"] == {"first": pytest.approx(0.4), "last": pytest.approx(0.97)}
    assert result["exact_match"] == {"first": pytest.approx(0.2), "last": pytest.approx(0.485)}
    assert result["staleness_max"] == 2 and result["steps"] == 9
    assert benchmark.table_row(result).startswith("| 2 | 0 | 0.400 → 0.970 | 0.200 → 0.485 |")
    assert benchmark.table_row(result).endswith("| 2 | 100 | 0.900, 0.750 |")
    assert benchmark.missed_limits(result) == []


def test_each_missed_limit_is_reported(benchmark: ModuleType) -> None:
    flat = run(benchmark, [0.7] * 9, 3, seconds=300.0)
    assert benchmark.missed_limits(flat) == [
        "first 3 steps 0.700",
        "last 5 steps 0.700",
        "staleness 3",
        "300 seconds",
    ]
