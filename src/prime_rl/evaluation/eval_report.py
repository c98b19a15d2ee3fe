"""Summarises finished evaluations, and shows them: metrics, a progress bar, a table.

Failed examples are counted by kind and are part of no mean.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from prime_rl.core.pass_at_k import REWARD_TOLERANCE, pass_at_k
from prime_rl.evaluation.eval_results import ExampleRow, RolloutRow

PASS_AT = (1, 2, 4, 8, 16, 32, 64, 128)

_FILE_COLUMNS = 160
"""Width of a table that is written to a file."""

Summary = dict[str, float | None]


def summarise(rows: Iterable[ExampleRow], pass_threshold: float) -> Summary:
    """Average over examples; a rollout is correct if its reward is at least `pass_threshold`.

    Returns:
        Counts, `pass@k` for the powers of two up to the number of rollouts n, at most 128, `avg@n` (the mean reward),
        `reward/stderr` (of that mean, over examples), `metrics/<name>`, lengths and versions. Values without data are
        None.
    """
    rows = list(rows)
    finished = [row.rollouts for row in rows if row.rollouts]
    failed = Counter(row.failure.kind for row in rows if row.failure is not None)
    rollouts = [rollout for group in finished for rollout in group]
    means = [float(np.mean([rollout.reward for rollout in group])) for group in finished]
    lengths = [rollout.tokens for rollout in rollouts]
    summary: Summary = {
        "examples": len(finished),
        "rollouts": len(rollouts),
        "errors": failed.total(),
        **{f"errors/{kind}": count for kind, count in sorted(failed.items())},
        "reward/mean": _mean(means),
        "reward/std": float(np.std([rollout.reward for rollout in rollouts])) if rollouts else None,
        "reward/stderr": float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None,
        **_pass_rates(finished, means, pass_threshold),
        "is_truncated/mean": _mean([rollout.is_truncated for rollout in rollouts]),
        "completion_len/mean": _mean(lengths),
        "completion_len/max": max(lengths, default=None),
    }
    for name in sorted({name for rollout in rollouts for name in rollout.metrics}):
        summary[f"metrics/{name}"] = _mean([r.metrics[name] for r in rollouts if name in r.metrics])
    versions = [v for rollout in rollouts for v in (rollout.min_version, rollout.max_version) if v is not None]
    if versions:
        summary |= {"version/min": min(versions), "version/max": max(versions)}
    return summary


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


def _pass_rates(finished: Sequence[Sequence[RolloutRow]], means: Sequence[float], threshold: float) -> Summary:
    if not finished:
        return {}
    smallest = min(len(group) for group in finished)
    counts = [
        (len(group), sum(rollout.reward >= threshold - REWARD_TOLERANCE for rollout in group)) for group in finished
    ]
    rates: Summary = {f"pass@{k}": _mean([pass_at_k(n, c, k) for n, c in counts]) for k in PASS_AT if k <= smallest}
    return {f"avg@{smallest}": _mean(means), **rates}


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


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
    """Print one line per result, and a second table with the means of the environments' metrics.

    `results` are summaries with `env`, and `version` if several were evaluated.
    """
    passes = [key for key in (f"pass@{k}" for k in PASS_AT) if any(key in result for result in results)]
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
        for key in sorted(key for key in result if key.startswith("metrics/")):
            metrics.add_row(*head, key.removeprefix("metrics/"), _format(result[key]))
    # Names come from environments and may contain markup.
    console = Console(markup=False, width=None if Console().is_terminal else _FILE_COLUMNS)
    console.print(table)
    if metrics.row_count:
        console.print(metrics)


def _format(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
