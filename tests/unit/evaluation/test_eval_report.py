"""pass@k and means against plain enumeration."""

from itertools import combinations

import pytest

from prime_rl.core.pass_at_k import pass_at_k
from prime_rl.evaluation.eval_report import summarise
from prime_rl.evaluation.eval_results import ExampleFailure, ExampleRow, RolloutRow


def rollout(reward, truncated=False, tokens=4, versions=(None, None), **metrics):
    return RolloutRow(reward, metrics, truncated, tokens, [], [], *versions)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_rollout(n):
    for correct in range(n + 1):
        outcomes = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            subsets = list(combinations(outcomes, k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_of_fixed_counts():
    # 1 - C(7, 4) / C(10, 4) = 1 - 35 / 210, and so on.
    assert pass_at_k(10, 3, 4) == pytest.approx(5 / 6, abs=1e-15)
    assert pass_at_k(200, 1, 8) == pytest.approx(8 / 200, abs=1e-15)
    assert pass_at_k(16, 9, 8) == 1.0  # fewer wrong ones than k
    assert pass_at_k(10_000, 1, 1) == 1e-4


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_out_of_range_raises(n, correct, k):
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(n, correct, k)


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
    # Means .55 and .15: their standard deviation is .4 / sqrt(2), over sqrt(2).
    assert summary["reward/stderr"] == pytest.approx(0.2)
    assert (summary["pass@1"], summary["pass@2"]) == (0.25, 0.5)
    assert not {"pass@4", "pass@8"} & summary.keys()
    assert summary["metrics/accuracy"] == pytest.approx(1 / 3)  # over the rollouts that have it
    assert (summary["is_truncated/mean"], summary["completion_len/mean"], summary["completion_len/max"]) == (0.25, 4, 6)
    assert "version/min" not in summary


def test_summary_pass_requires_the_threshold():
    rows = [ExampleRow(0, [rollout(0.7 + 0.2 + 0.1)]), ExampleRow(1, [rollout(0.999)])]
    assert summarise(rows, 1.0)["pass@1"] == 0.5, "0.7 + 0.2 + 0.1 is 1 but for rounding"
    assert summarise(rows, 0.9)["pass@1"] == 1.0


def test_summary_reports_the_sampling_versions():
    rows = [ExampleRow(0, [rollout(0, versions=(3, 5))]), ExampleRow(1, [rollout(0, versions=(4, 4))])]
    summary = summarise(rows, 1.0)
    assert (summary["version/min"], summary["version/max"]) == (3, 5)


def test_summary_without_finished_examples_has_no_means():
    summary = summarise([ExampleRow(0, failure=ExampleFailure("refused", "no"))], 1.0)
    assert (summary["examples"], summary["errors"], summary["reward/mean"]) == (0, 1, None)
    assert not any(key.startswith("pass@") for key in summary)
