"""Summarises finished evaluations, and shows them: metrics, a progress bar, a table.

Failed examples are counted by kind and are part of no mean.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from prime_rl.evaluation.eval_results import ExampleRow
from prime_rl.evaluation.eval_statistics import (
    Z_95,
    Summary,
    breakdown,
    example_means,
    majority_vote,
    mean,
    pass_rates,
)

_FILE_COLUMNS = 160
"""Width of a table that is written to a file."""


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
        Counts, `pass@k` and `pass^k` for k up to the number of rollouts n, `maj@n`, `avg@n` (the mean reward),
        `reward/stderr` (of that mean, over examples), 95 % confidence intervals, `metrics/<name>`, lengths, versions,
        and `by/<column>/<value>` (`breakdown`). Values without data are None.
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
        for key in filter(re.compile(r"metrics/|by/|maj@\d+$|pass\^\d+$").match, result):
            metrics.add_row(*head, key.removeprefix("metrics/"), _format(result[key]))
    # Names come from environments and may contain markup.
    console = Console(markup=False, width=None if Console().is_terminal else _FILE_COLUMNS)
    console.print(table)
    if metrics.row_count:
        console.print(metrics)


def _format(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
