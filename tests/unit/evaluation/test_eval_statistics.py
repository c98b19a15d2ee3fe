"""Pass rates, intervals, votes, breakdowns and means against enumeration and published values."""

import itertools
import json
import sys
from itertools import combinations

import msgspec
import numpy as np
import pytest

from prime_rl.configs.eval import EvalConfig
from prime_rl.core.errors import ConfigError
from prime_rl.core.pass_at_k import pass_at_k, pass_hat_k
from prime_rl.entrypoints.eval import main
from prime_rl.evaluation.eval_report import (
    breakdown,
    compare,
    majority_vote,
    pass_rates,
    print_table,
    summarise,
    wilson_interval,
)
from prime_rl.evaluation.eval_results import ExampleFailure, ExampleRow, RolloutRow


def says(text, reward=0.0):
    return RolloutRow(reward, {}, False, 1, [{"role": "user", "content": "9"}, {"role": "assistant", "content": text}])


def scored(*rewards):
    return [says("", reward) for reward in rewards]


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize(("rate", "counts"), [(pass_at_k, any), (pass_hat_k, all)])
def test_pass_rate_is_the_share_of_subsets(n, rate, counts):
    for correct in range(n + 1):
        outcomes = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            subsets = list(combinations(outcomes, k))
            expected = sum(counts(subset) for subset in subsets) / len(subsets)
            assert rate(n, correct, k) == pytest.approx(expected, abs=1e-15)
    assert rate(10_000, 1, 1) == 1e-4


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_rate_out_of_range_raises(n, correct, k):
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(n, correct, k)
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
    for _ in range(150):
        solved = rng.random(60) < 0.3
        summary = summarise([ExampleRow(i, scored(float(each), float(each))) for i, each in enumerate(solved)], 1.0)
        covered += summary["pass@1/ci95_low"] <= 0.3 <= summary["pass@1/ci95_high"]
        assert summary["reward/ci95_low"] <= summary["reward/mean"] <= summary["reward/ci95_high"]
    assert 0.91 <= covered / 150 <= 0.99


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
    many = [ExampleRow(i, scored(1), columns={"id": str(min(i, 200))}) for i in range(300)]
    values = {key.split("/")[2] for key in breakdown(many, 1.0)}
    assert len(values) == 50 and "200" in values, "the most frequent"


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


# The summary of an environment


def rollout(reward, truncated=False, tokens=4, versions=(None, None), **metrics):
    return RolloutRow(reward, metrics, truncated, tokens, [], [], *versions)


def test_summary_averages_examples_and_counts_failures_separately():
    rows = [
        ExampleRow(0, [rollout(1.1, tokens=2, accuracy=1.0), rollout(0.0, True, tokens=6, accuracy=0.0)]),
        ExampleRow(3, [rollout(0.1, tokens=4, accuracy=0.0), rollout(0.2, tokens=4)]),
        ExampleRow(5, failure=ExampleFailure("environment", "KeyError")),
        ExampleRow(6, failure=ExampleFailure("overlong", "too long")),
        ExampleRow(7, failure=ExampleFailure("environment", "KeyError")),
    ]
    summary = summarise(rows, pass_threshold=1.0)
    assert (summary["examples"], summary["rollouts"], summary["errors"]) == (2, 4, 3)
    assert (summary["errors/environment"], summary["errors/overlong"]) == (2, 1)
    assert summary["reward/mean"] == summary["avg@2"] == pytest.approx(0.35)
    assert summary["reward/mean_if_failed_is_0"] == pytest.approx(0.7 / 5)
    assert "reward/mean_if_failed_is_0" not in summarise(rows[:2], pass_threshold=1.0)
    # Means .55 and .15: their standard deviation is .4 / sqrt(2), over sqrt(2).
    assert summary["reward/stderr"] == pytest.approx(0.2)
    assert (summary["pass@1"], summary["pass@2"]) == (0.25, 0.5)
    assert not {"pass@4", "pass@8"} & summary.keys()
    assert summary["metrics/accuracy"] == pytest.approx(1 / 3)  # over the rollouts that have it
    assert (summary["is_truncated/mean"], summary["completion_len/mean"], summary["completion_len/max"]) == (0.25, 4, 6)
    assert "version/min" not in summary


def test_summary_pass_requires_the_threshold_and_versions_are_a_range():
    rows = [
        ExampleRow(0, [rollout(0.7 + 0.2 + 0.1, versions=(3, 5))]),
        ExampleRow(1, [rollout(0.999, versions=(4, 4))]),
    ]
    summary = summarise(rows, 1.0)
    assert summary["pass@1"] == 0.5, "0.7 + 0.2 + 0.1 is 1 but for rounding"
    assert summarise(rows, 0.9)["pass@1"] == 1.0
    assert (summary["version/min"], summary["version/max"]) == (3, 5)


def test_summary_without_finished_examples_has_no_means():
    summary = summarise([ExampleRow(0, failure=ExampleFailure("refused", "no"))], 1.0)
    assert (summary["examples"], summary["errors"], summary["reward/mean"]) == (0, 1, None)
    assert not any(key.startswith("pass@") for key in summary)


# Two evaluations compared example by example


@pytest.fixture
def write(tmp_path):
    """Write the results of an environment and return their directory."""

    def written(run, env, rewards, settings=None, digest="d"):
        folder = tmp_path / run / "evals" / env / digest
        folder.mkdir(parents=True)
        failure = ExampleFailure("environment", "KeyError")
        rows = [
            ExampleRow(i, scored(*group)) if group else ExampleRow(i, failure=failure) for i, group in rewards.items()
        ]
        (folder / "rollouts.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        (folder / "settings.json").write_text(json.dumps(settings or {}))
        return folder

    return written


def test_comparison_pairs_the_examples_that_both_have(write):
    a = write("a", "gsm8k", {0: [0, 1], 1: [0], 2: [1], 3: None, 4: [0]}, {"model": "x", "sampling": {"t": 1}})
    b = write("b", "gsm8k", {0: [1, 1], 1: [1], 2: [0], 3: [1], 9: [1]}, {"model": "y", "sampling": {"t": 0}})
    (each,) = compare(a, b)
    assert (each.env, each.examples, each.better, each.worse) == ("gsm8k", 3, 2, 1)
    assert (each.before, each.after) == pytest.approx((0.5, 2 / 3))
    # Differences .5, 1, -1: their mean is 1/6, their standard deviation 1.0408.
    assert (each.low, each.high) == pytest.approx((1 / 6 - 1.1778, 1 / 6 + 1.1778), abs=1e-3)
    assert each.differences == ("sampling",)


def test_comparison_of_two_output_directories_covers_all_common_environments(write, tmp_path):
    for run in ("a", "b"):
        write(run, "gsm8k", {0: [1]})
        write(run, "math500", {0: [1], 1: [0]})
    write("a", "other", {0: [1]})
    assert [each.env for each in compare(tmp_path / "a", tmp_path / "b" / "evals")] == ["gsm8k", "math500"]


def test_equal_rewards_in_another_order_are_neither_better_nor_worse(write):
    a = write("a", "e", {0: [0.1, 0.7, 0.2], 1: [0.3, 0.1, 0.6, 0.2]})
    (each,) = compare(a, write("b", "e", {0: [0.7, 0.2, 0.1], 1: [0.6, 0.2, 0.3, 0.1]}))
    assert (each.better, each.worse, each.p_value) == (0, 0, 1.0)


@pytest.mark.parametrize("scale", [0.1, 1.0, 1e6])
def test_p_value_is_that_of_all_sign_flips_at_any_scale(write, scale):
    """Equal rewards differ by rounding only, also where they are large."""
    steps = [3, 1, 4, 1, -5, 2, 6, -5, 3, 5]
    flips = np.array(list(itertools.product([1, -1], repeat=len(steps)))) @ steps
    exact = float((abs(flips) >= abs(sum(steps))).mean())
    a = write("a", "e", {i: [7.3 * scale] for i in range(len(steps))})
    b = write("b", "e", {i: [(7.3 + 0.1 * step) * scale] for i, step in enumerate(steps)})
    assert compare(a, b)[0].p_value == pytest.approx(exact, abs=0.02)


def test_command_prints_the_comparison_of_two_results(write, monkeypatch, capsys):
    a = write("a", "gsm8k", {0: [0], 1: [0]}, {"args": {}})
    b = write("b", "gsm8k", {0: [1], 1: [1]}, {"args": {"x": 1}})
    monkeypatch.setattr(sys, "argv", ["eval", "--compare", str(a), str(b)])
    main()
    printed = capsys.readouterr().out
    assert "+1.000" in printed and "the settings of gsm8k differ: args" in printed
    sys.argv.pop()
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "usage: eval --compare A B" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a", "missing"), r"missing has no results of `eval`"),
        (("a", "c"), r"share no environment"),
        (("a/evals/gsm8k/d", "c/evals/other/d"), r"no finished example in common"),
        (("a/evals/gsm8k/d", "c"), r"c has no rollouts\.jsonl; name one evaluation"),
        (("a", "twice"), r"has several evaluations; name one of"),
        (("a/evals/gsm8k/d", "broken.jsonl"), r"is not a file of evaluated examples"),
    ],
)
def test_results_that_cannot_be_compared_are_one_line(names, message, write, tmp_path):
    write("a", "gsm8k", {0: [1]})
    write("c", "other", {5: [1]})
    write("twice", "gsm8k", {0: [1]})
    write("twice", "gsm8k", {0: [1]}, digest="e")
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(ConfigError, match=message) as caught:
        compare(*(tmp_path / name for name in names))
    assert "\n" not in str(caught.value)
