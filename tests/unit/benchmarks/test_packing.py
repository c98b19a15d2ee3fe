"""The packing benchmark's lower bound and figures."""

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.batching.packing import best_fit_decreasing

SCRIPT = Path(__file__).parents[3] / "benchmarks/packing.py"


def load():
    spec = importlib.util.spec_from_file_location("benchmark_packing", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


benchmark = load()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_fewest_rows_is_a_lower_bound(lengths):
    fewest = min(
        len(set(rows))
        for rows in itertools.product(range(len(lengths)), repeat=len(lengths))
        if all(sum(n for n, r in zip(lengths, rows, strict=True) if r == row) <= 30 for row in set(rows))
    )
    assert benchmark.fewest_rows(lengths, 30) <= fewest <= len(best_fit_decreasing(lengths, 30))


@pytest.mark.parametrize(("lengths", "bound"), [([16] * 4, 4), ([10] * 6, 2), ([11] * 5, 3), ([30, 1], 2), ([5, 5], 1)])
def test_fewest_rows_is_tighter_than_the_sum(lengths, bound):
    assert benchmark.fewest_rows(lengths, 30) == bound


def test_balance_of_four_rows_on_two_ranks():
    assert benchmark.balance([4.0, 3.0, 2.0, 1.0], [[0, 3], [1, 2]]) == (1.0, (4 + 2) / 5)
    assert benchmark.balance([4.0, 3.0], [[0], [-1]]) == (8 / 4, 8 / 4)


def test_figures_of_one_distribution():
    record = benchmark.measure("few", 100, lambda random: random.uniform(1, 60, 50))
    assert record["distribution"] == "few" and record["samples"] == 50
    assert 1 <= record["bins_over_bound"] < 1.1
    assert record["rows"] >= record["bins"] >= record["bound"]
    assert record["imbalance_1"] == record["step_1"] == 1
    for world in (2, 4, 8):
        assert 1 <= record[f"imbalance_{world}"] <= record[f"step_{world}"] < record[f"ffd_step_{world}"]
    assert np.isfinite([value for value in record.values() if not isinstance(value, str)]).all()
