"""Pass rates, intervals, votes and breakdowns against enumeration and published values."""

from itertools import combinations

import numpy as np
import pytest

from prime_rl.configs.eval import EvalConfig
from prime_rl.core.errors import ConfigError
from prime_rl.core.pass_at_k import pass_hat_k
from prime_rl.evaluation.eval_report import print_table, summarise
from prime_rl.evaluation.eval_results import ExampleRow, RolloutRow
from prime_rl.evaluation.eval_statistics import breakdown, majority_vote, pass_rates, wilson_interval


def says(text, reward=0.0):
    return RolloutRow(reward, {}, False, 1, [{"role": "user", "content": "9"}, {"role": "assistant", "content": text}])


def scored(*rewards):
    return [says("", reward) for reward in rewards]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_pass_hat_k_is_the_share_of_subsets_that_are_all_correct(n):
    for correct in range(n + 1):
        outcomes = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            subsets = list(combinations(outcomes, k))
            expected = sum(all(subset) for subset in subsets) / len(subsets)
            assert pass_hat_k(n, correct, k) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_hat_k_out_of_range_raises(n, correct, k):
    with pytest.raises(ValueError, match=rf"pass\^{k}"):
        pass_hat_k(n, correct, k)


def test_pass_rates_are_reported_for_the_given_k():
    groups = [scored(1, 1, 0), scored(1, 0, 0, 0)]
    rates = pass_rates(groups, 1.0, pass_at=[1, 3, 4])
    assert {key for key in rates if "/" not in key} == {"pass@1", "pass@3", "pass^3"}
    assert rates["pass@3"] == pytest.approx((1 + 0.75) / 2)
    assert rates["pass^3"] == 0.0
    assert pass_rates(groups, 1.0)["pass^2"] == pytest.approx((1 / 3 + 0) / 2)
    assert rates["pass@1/ci95_low"] < rates["pass@1"] < rates["pass@1/ci95_high"]


@pytest.mark.parametrize(
    ("rate", "count", "low", "high"),
    [(0.0, 10, 0.0, 0.2775), (1.0, 10, 0.7225, 1.0), (0.5, 20, 0.2993, 0.7007), (0.15, 100, 0.0931, 0.2328)],
)
def test_wilson_interval_has_its_published_values(rate, count, low, high):
    assert wilson_interval(rate, count) == pytest.approx((low, high), abs=1e-4)


def test_intervals_contain_the_truth_in_95_percent_of_evaluations():
    """Also where the rollouts of an example are equal."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        solved = rng.random(60) < 0.3
        summary = summarise([ExampleRow(i, scored(float(each), float(each))) for i, each in enumerate(solved)], 1.0)
        covered += summary["pass@1/ci95_low"] <= 0.3 <= summary["pass@1/ci95_high"]
        assert summary["reward/ci95_low"] <= summary["reward/mean"] <= summary["reward/ci95_high"]
    assert 0.92 <= covered / 400 <= 0.98


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([("it is 3", 1), ("3", 1), ("4", 0)], 1.0),
        ([("3", 0), ("so 3", 0), ("4", 1)], 0.0),
        ([("3", 1), ("4", 0)], 0.5),  # a tie
        ([("none", 0), ("four", 0), ("4", 1)], 1.0),  # rollouts without an answer have no vote
        ([("none", 1), ("", 1)], 0.0),
        ([("3 or 4", 1), ("1 2 4", 1), ("4 3", 0)], 1.0),  # the last match
    ],
)
def test_majority_vote_takes_the_most_frequent_answer(replies, expected):
    group = [says(text, reward) for text, reward in replies]
    assert majority_vote([group], 1.0, r"\d+") == {f"maj@{len(group)}": expected}
    assert majority_vote([group], 1.0, r"(\d+)") == {f"maj@{len(group)}": expected}


def test_breakdown_averages_the_examples_of_each_value():
    rows = [
        ExampleRow(0, scored(1, 0), columns={"level": "1", "answer": "A/B"}),
        ExampleRow(1, scored(1, 1), columns={"level": "1", "answer": "C"}),
        ExampleRow(2, scored(0, 0.5), columns={"level": "2", "answer": "C"}),
        ExampleRow(3, columns={"level": "3"}),
    ]
    summary = breakdown(rows, 1.0)
    assert summary["by/level/1/examples"] == 2
    assert summary["by/level/1/pass@1"] == summary["by/level/1/reward/mean"] == 0.75
    assert (summary["by/level/2/reward/mean"], summary["by/level/2/pass@1"]) == (0.25, 0.0)
    assert summary["by/answer/A_B/examples"] == 1
    assert not any(key.startswith("by/level/3") for key in summary)


def test_breakdown_of_many_values_is_limited_to_the_most_frequent():
    rows = [ExampleRow(i, scored(1), columns={"id": str(min(i, 200))}) for i in range(300)]
    values = {key.split("/")[2] for key in breakdown(rows, 1.0)}
    assert len(values) == 50 and "200" in values


def test_table_shows_breakdown_votes_and_pass_hat(capsys):
    rows = [ExampleRow(0, [says("3", 1.0), says("4", 0.0)], columns={"level": "1"})]
    print_table([{"env": "e", **summarise(rows, 1.0, [1, 2], r"\d")}])
    printed = capsys.readouterr().out
    for text in ("pass@1", "pass@2", "pass^2", "maj@2", "by/level/1/pass@1"):
        assert text in printed
    assert "ci95" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pass-at", "1,9", "--rollouts-per-example", "8"], "pass_at contains 9, but an example has 8 rollouts"),
        (["--majority-pattern", "("], r"is not a regular expression"),
    ],
)
def test_invalid_statistics_are_one_line(arguments, message):
    with pytest.raises(ConfigError, match=message):
        EvalConfig.load(["--env.id", "reverse_text", *arguments])
