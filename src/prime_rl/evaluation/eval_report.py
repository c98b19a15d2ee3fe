"""Summarises evaluations, shows them, and compares two of them example by example (`eval --compare A B`).

Summaries have pass rates, majority votes, confidence intervals and breakdowns. Failed examples are counted by kind and
are part of no mean but `reward/mean_if_failed_is_0`.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from prime_rl.core.errors import ConfigError
from prime_rl.core.pass_at_k import REWARD_TOLERANCE, pass_at_k, pass_hat_k
from prime_rl.evaluation.eval_results import ROLLOUTS, SETTINGS, ExampleRow, RolloutRow
from prime_rl.rollouts.rendering.messages import last_reply

_FILE_COLUMNS = 160
"""Width of a table that is written to a file."""
PASS_AT = (1, 2, 4, 8, 16, 32, 64, 128)
Z_95 = 1.959964
"""0.975 quantile of the normal distribution."""
_MAX_VALUES = 50
"""Largest number of values of a column in a breakdown; the most frequent ones are reported."""
_MAX_VALUE_CHARS = 40
_TAIL_CHARS = 20_000
"""An answer is within so many characters of the end of a reply."""
Summary = dict[str, float | None]
Group = Sequence[RolloutRow]
_PERMUTATIONS = 10_000
_SEED = 0
_ROUNDING = 1e-9
_EXPECTED = {"model", "version", "weights", "servers", "api"}
"""Settings in which two evaluations differ on purpose."""


def summarise(
    rows: Iterable[ExampleRow], pass_threshold: float, pass_at: Sequence[int] = (), majority_pattern: str | None = None
) -> Summary:
    """Average over examples; a rollout is correct if its reward is at least `pass_threshold`.

    Args:
        rows: the examples.
        pass_threshold: minimum reward of a correct rollout.
        pass_at: the k of pass@k and pass^k; by default the powers of two, at most 128.
        majority_pattern: pattern of the answer in a reply (`majority_vote`); None reports no majority vote.

    Returns:
        Counts, `reward/mean_if_failed_is_0` if examples failed, `pass@k` and `pass^k` for k up to the number of
        rollouts n, `maj@n`, `avg@n` (the mean reward), `reward/stderr` (of that mean, over examples), 95 % confidence
        intervals, `metrics/<name>`, lengths, versions, and `by/<column>/<value>` (`breakdown`). Values without data are
        None.
    """
    rows = list(rows)
    finished = [row.rollouts for row in rows if row.rollouts]
    failed = Counter(row.failure.kind for row in rows if row.failure is not None)
    rollouts = [rollout for group in finished for rollout in group]
    means = example_means(finished)
    reward, stderr = mean(means), float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None
    interval = () if reward is None or stderr is None else (reward - Z_95 * stderr, reward + Z_95 * stderr)
    lengths = [rollout.tokens for rollout in rollouts]
    summary: Summary = {
        "examples": len(finished),
        "rollouts": len(rollouts),
        "errors": failed.total(),
        **{f"errors/{kind}": count for kind, count in sorted(failed.items())},
        "reward/mean": reward,
        **({"reward/mean_if_failed_is_0": sum(means) / (len(means) + failed.total())} if failed else {}),
        "reward/std": float(np.std([rollout.reward for rollout in rollouts])) if rollouts else None,
        "reward/stderr": stderr,
        **dict(zip(("reward/ci95_low", "reward/ci95_high"), interval, strict=False)),
        **({f"avg@{min(map(len, finished))}": reward} if finished else {}),
        **pass_rates(finished, pass_threshold, pass_at),
        **(majority_vote(finished, pass_threshold, majority_pattern) if majority_pattern is not None else {}),
        "is_truncated/mean": mean([rollout.is_truncated for rollout in rollouts]),
        "completion_len/mean": mean(lengths),
        "completion_len/max": max(lengths, default=None),
    }
    for name in sorted({name for rollout in rollouts for name in rollout.metrics}):
        summary[f"metrics/{name}"] = mean([r.metrics[name] for r in rollouts if name in r.metrics])
    versions = [v for rollout in rollouts for v in (rollout.min_version, rollout.max_version) if v is not None]
    if versions:
        summary |= {"version/min": min(versions), "version/max": max(versions)}
    return summary | breakdown(rows, pass_threshold)


def sample_rows(env: str, rows: Iterable[ExampleRow], limit: int) -> list[dict[str, Any]]:
    """Return up to `limit` rollouts as rows of a table: environment, example, reward, truncation, conversation."""
    rollouts = ((row.example, rollout) for row in rows for rollout in row.rollouts)
    return [
        {
            "env": env,
            "example": example,
            "reward": rollout.reward,
            "is_truncated": rollout.is_truncated,
            "completion_len": rollout.tokens,
            "messages": rollout.messages,
        }
        for example, rollout in islice(rollouts, limit)
    ]


def prefix_metrics(prefix: str, env: str, summary: Summary) -> Summary:
    """Return a summary with the names of its metrics: `prefix/env/name`."""
    return {f"{prefix}/{env}/{key}": value for key, value in summary.items()}


@contextmanager
def progress_bar(name: str, rows: Sequence[ExampleRow], total: int) -> Iterator[Callable[[ExampleRow], None]]:
    """Show a progress bar on stderr with the mean reward and the number of errors; yield a function that adds a row.

    `rows` are those of an earlier process.
    """
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    rewards, errors = list[float](), 0
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=total, status="")

        def add(row: ExampleRow) -> None:
            nonlocal errors
            rewards.extend(rollout.reward for rollout in row.rollouts)
            errors += row.failure is not None
            status = f"reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
            progress.update(task, advance=1, status=status + (f" errors {errors}" if errors else ""))

        for row in rows:
            add(row)
        yield add


def print_table(results: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per result, and a second table with pass^k, majority votes, breakdowns and the means of metrics.

    `results` are summaries with `env`, and `version` if several were evaluated.
    """
    keys = dict.fromkeys(key for result in results for key in result)
    passes = sorted((key for key in keys if re.fullmatch(r"pass@\d+", key)), key=lambda key: int(key[5:]))
    versions = any(result.get("version") is not None for result in results)
    titles = [*(["version"] if versions else []), "environment", "examples", "rollouts", "errors", "reward", *passes]
    table = Table(*titles, "truncated", "tokens")
    metrics = Table(*(["version"] if versions else []), "environment", "metric", "mean")
    for result in results:
        head = [str(result["version"])] if versions else []
        head.append(str(result["env"]))
        counts = [str(result[key]) for key in ("examples", "rollouts", "errors")]
        error = result["reward/stderr"]
        reward = _format(result["reward/mean"]) + ("" if error is None else f"±{error:.3f}")
        shares = [_format(result.get(key)) for key in (*passes, "is_truncated/mean")]
        table.add_row(*head, *counts, reward, *shares, _format(result["completion_len/mean"], 1))
        for key in filter(re.compile(r"metrics/|by/|reward/mean_if|maj@\d+$|pass\^\d+$").match, result):
            metrics.add_row(*head, key.removeprefix("metrics/"), _format(result[key]))
    # Names come from environments and may contain markup.
    console = Console(markup=False, width=None if Console().is_terminal else _FILE_COLUMNS)
    console.print(table)
    if metrics.row_count:
        console.print(metrics)


def _format(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None without values."""
    return float(np.mean(values)) if len(values) else None


def passes(rollout: RolloutRow, threshold: float) -> bool:
    """Return whether the reward of a rollout is at least `threshold`."""
    return rollout.reward >= threshold - REWARD_TOLERANCE


def pass_rates(groups: Sequence[Group], threshold: float, pass_at: Sequence[int] = ()) -> Summary:
    """Return pass@k with its confidence interval, and pass^k for k > 1.

    `pass_at` are the k, by default the powers of two; those above the number of rollouts n are left out.
    """
    if not groups:
        return {}
    smallest = min(map(len, groups))
    counts = [(len(group), sum(passes(rollout, threshold) for rollout in group)) for group in groups]
    rates: Summary = {}
    for k in (k for k in pass_at or PASS_AT if k <= smallest):
        named = [(f"pass@{k}", pass_at_k)] + ([(f"pass^{k}", pass_hat_k)] if k > 1 else [])
        for name, estimate in named:
            rates[name] = rate = float(np.mean([estimate(n, c, k) for n, c in counts]))
            rates[f"{name}/ci95_low"], rates[f"{name}/ci95_high"] = wilson_interval(rate, len(groups))
    return rates


def wilson_interval(rate: float, count: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a mean of `count` independent values between 0 and 1.

    Wilson 1927. Exact enough for single rollouts. With several rollouts per example, the means of the examples vary
    less than the binomial distribution assumes, so the interval is too wide rather than too narrow.
    """
    spread = Z_95**2 / count
    centre = (rate + spread / 2) / (1 + spread)
    half = math.sqrt(max(0.0, rate * (1 - rate) / count + spread / (4 * count))) * Z_95 / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def majority_vote(groups: Sequence[Group], threshold: float, pattern: str) -> Summary:
    """Return maj@n: the share of examples whose most frequent answer is correct.

    The answer of a rollout is the last match of `pattern` in its last reply (group 1, if there is one). Its rollouts
    say whether an answer is correct. Of several most frequent answers each counts in part; no answer is incorrect.
    """
    if not groups:
        return {}
    expression = re.compile(pattern)
    votes = [
        _vote([(_answer(rollout, expression), passes(rollout, threshold)) for rollout in group]) for group in groups
    ]
    return {f"maj@{min(map(len, groups))}": mean(votes)}


def breakdown(rows: Iterable[ExampleRow], threshold: float) -> Summary:
    """Return number of examples, mean reward and pass@1 for each value of each column of the examples."""
    values: dict[str, dict[str, list[Group]]] = {}
    for row in rows:
        for column, value in row.columns.items() if row.rollouts else ():
            label = value.replace("/", "_")[:_MAX_VALUE_CHARS]
            values.setdefault(column, {}).setdefault(label, []).append(row.rollouts)
    summary: Summary = {}
    for column, groups_of in sorted(values.items()):
        most_frequent = sorted(groups_of, key=lambda label: (-len(groups_of[label]), label))[:_MAX_VALUES]
        for label in sorted(most_frequent):
            groups, name = groups_of[label], f"by/{column}/{label}"
            summary[f"{name}/examples"] = len(groups)
            summary[f"{name}/reward/mean"] = mean(example_means(groups))
            summary[f"{name}/pass@1"] = pass_rates(groups, threshold, [1])["pass@1"]
    return summary


def example_means(groups: Sequence[Group]) -> list[float]:
    """Return the mean reward of each group, one group per example."""
    return [float(np.mean([rollout.reward for rollout in group])) for group in groups]


def _answer(rollout: RolloutRow, expression: re.Pattern[str]) -> str | None:
    text = last_reply(rollout.messages)[-_TAIL_CHARS:]
    matches = [match.group(1 if expression.groups else 0) for match in expression.finditer(text)]
    return None if not matches or matches[-1] is None else str(matches[-1].strip())


def _vote(answers: Sequence[tuple[str | None, bool]]) -> float:
    counts = Counter(answer for answer, _ in answers if answer is not None)
    if not counts:
        return 0.0
    best = [answer for answer, count in counts.items() if count == max(counts.values())]
    correct: Mapping[str, list[bool]] = {a: [passed for other, passed in answers if other == a] for a in best}
    return float(np.mean([np.mean(passed) for passed in correct.values()]))


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Two evaluations of one environment. Rewards are means over the rollouts of an example.

    Attributes:
        env: name of the environment.
        examples: number of examples that both have finished.
        before: mean reward of A.
        after: mean reward of B.
        low, high: 95 % confidence interval of the mean difference B - A, over examples.
        p_value: of a difference at least as large if A and B were exchangeable for each example.
        better, worse: number of examples with a higher and a lower reward in B.
        differences: settings that differ, except model and servers.
    """

    env: str
    examples: int
    before: float
    after: float
    low: float
    high: float
    p_value: float
    better: int
    worse: int
    differences: tuple[str, ...]


def compare(a: Path, b: Path) -> list[PairedComparison]:
    """Compare two results: result files, their directories, or directories with several environments.

    Raises:
        ConfigError: one has no results, they have no environment or example in common, or two results of one
            environment.
    """
    if (a / ROLLOUTS).is_file() or a.is_file() or (b / ROLLOUTS).is_file() or b.is_file():
        return [_compare(a.resolve().parent.name, _result_file(a), _result_file(b))]
    before, after = _by_environment(a), _by_environment(b)
    if not (common := sorted(before.keys() & after.keys())):
        names = [f"{path} ({', '.join(sorted(found))})" for path, found in ((a, before), (b, after))]
        raise ConfigError(f"{' and '.join(names)} share no environment")
    return [_compare(env, before[env], after[env]) for env in common]


def print_comparisons(comparisons: Sequence[PairedComparison]) -> None:
    """Print one line per environment, and the settings that differ."""
    table = Table("environment", "examples", "A", "B", "B - A", "95 % interval", "p", "better", "worse")
    for each in comparisons:
        table.add_row(
            each.env, str(each.examples), f"{each.before:.3f}", f"{each.after:.3f}",
            f"{each.after - each.before:+.3f}", f"{each.low:+.3f} to {each.high:+.3f}", f"{each.p_value:.4f}",
            str(each.better), str(each.worse),
        )  # fmt: skip
    console = Console(markup=False, width=None if Console().is_terminal else _FILE_COLUMNS)
    console.print(table)
    for each in comparisons:
        if each.differences:
            console.print(f"warning: the settings of {each.env} differ: {', '.join(each.differences)}", soft_wrap=True)


def _compare(env: str, a: Path, b: Path) -> PairedComparison:
    before, after = _rewards(a), _rewards(b)
    if not (common := sorted(before.keys() & after.keys())):
        raise ConfigError(f"{a} and {b} have no finished example in common")
    first = np.array([before[example] for example in common])
    second = np.array([after[example] for example in common])
    # The means of equal rewards in another order differ by rounding.
    difference = np.where(np.isclose(second, first, rtol=_ROUNDING, atol=0), 0.0, second - first)
    mean = float(difference.mean())
    half = Z_95 * float(difference.std(ddof=1)) / len(common) ** 0.5 if len(common) > 1 else float("nan")
    settings = _settings(a), _settings(b)
    keys = sorted((settings[0].keys() | settings[1].keys()) - _EXPECTED)
    return PairedComparison(
        env, len(common), float(first.mean()), float(second.mean()), mean - half, mean + half,
        _sign_flip_p_value(difference), int((difference > 0).sum()), int((difference < 0).sum()),
        tuple(key for key in keys if settings[0].get(key) != settings[1].get(key)),
    )  # fmt: skip


def _sign_flip_p_value(difference: NDArray[np.float64]) -> float:
    """Return the share of random sign flips whose mean is at least as far from 0; seeded, counts the observed one."""
    rng, extreme = np.random.default_rng(_SEED), 1
    changed = difference[difference != 0]  # a flip of 0 changes nothing
    least = abs(float(changed.sum())) - _ROUNDING * float(np.abs(changed).sum())  # equal sums differ by rounding
    for _ in range(_PERMUTATIONS):
        signs = rng.integers(0, 2, len(changed)) * 2 - 1
        extreme += abs(float(changed @ signs)) >= least
    return extreme / (_PERMUTATIONS + 1)


def _rewards(path: Path) -> dict[int, float]:
    decode = msgspec.json.Decoder(ExampleRow).decode
    try:
        rows = [decode(line) for line in path.read_bytes().splitlines()]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a file of evaluated examples: {error}") from None
    latest = {row.example: row for row in rows}  # the last row of an example counts
    return {
        example: float(np.mean([rollout.reward for rollout in row.rollouts]))
        for example, row in latest.items()
        if row.rollouts
    }


def _settings(path: Path) -> Mapping[str, Any]:
    file = path.with_name(SETTINGS)
    return json.loads(file.read_text()) if file.is_file() else {}


def _result_file(path: Path) -> Path:
    file = path / ROLLOUTS if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path} has no {ROLLOUTS}; name one evaluation, evals/<environment>/<digest>")
    return file


def _by_environment(directory: Path) -> dict[str, Path]:
    """Return the result file of each environment below an output directory, or its `evals`."""
    root = directory / "evals" if (directory / "evals").is_dir() else directory
    found: dict[str, Path] = {}
    for file in sorted(root.glob(f"*/*/{ROLLOUTS}")):
        env = file.parent.parent.name
        if env in found:
            raise ConfigError(f"{root / env} has several evaluations; name one of {found[env].parent}, {file.parent}")
        found[env] = file
    if not found:
        raise ConfigError(f"{directory} has no results of `eval` (evals/<environment>/<digest>/{ROLLOUTS})")
    return found
