"""Two evaluations compared example by example."""

import json
import sys

import msgspec
import numpy as np
import pytest

from prime_rl.core.errors import ConfigError
from prime_rl.entrypoints.eval import main
from prime_rl.evaluation.eval_results import ExampleFailure, ExampleRow, RolloutRow
from prime_rl.evaluation.paired_comparison import compare


@pytest.fixture
def write(tmp_path):
    """Write the results of an environment and return their directory."""

    def written(run, env, rewards, settings=None, digest="d"):
        folder = tmp_path / run / "evals" / env / digest
        folder.mkdir(parents=True)
        rows = [
            ExampleRow(i, [RolloutRow(each, {}, False, 1, []) for each in group])
            if group
            else ExampleRow(i, failure=ExampleFailure("environment", "KeyError"))
            for i, group in rewards.items()
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


def test_p_value_separates_a_difference_from_noise(write):
    rng = np.random.default_rng(0)
    first = [float(value) for value in rng.integers(0, 2, 200)]
    noise = {i: [float(value)] for i, value in enumerate(rng.permutation(first))}
    better = {i: [float(value or i % 8 == 0)] for i, value in enumerate(first)}
    a = write("a", "e", {i: [value] for i, value in enumerate(first)})
    assert compare(a, write("noise", "e", noise))[0].p_value > 0.05
    assert compare(a, write("better", "e", better))[0].p_value < 0.01
    assert compare(a, a)[0].p_value == 1.0


def test_command_prints_the_comparison(write, monkeypatch, capsys):
    a, b = (
        write("a", "gsm8k", {0: [0], 1: [0]}, {"args": {}}),
        write("b", "gsm8k", {0: [1], 1: [1]}, {"args": {"x": 1}}),
    )
    monkeypatch.setattr(sys, "argv", ["eval", "--compare", str(a), str(b)])
    main()
    printed = capsys.readouterr().out
    assert "+1.000" in printed and "the settings of gsm8k differ: args" in printed


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


def test_command_without_two_results_exits_with_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["eval", "--compare", "a"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "usage: eval --compare A B" in capsys.readouterr().err
