"""Results for people: a progress bar, a table, metrics under a prefix."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from prime_rl.orchestrator.evals.rows import ExampleRow
from prime_rl.orchestrator.evals.scores import Summary

_FILE_COLUMNS = 160
"""Width of a table that goes to a file."""


class Bar(Protocol):
    """Shows how far one environment is."""

    def add(self, row: ExampleRow) -> None:
        """Count an example that has ended."""
        ...


class _RichBar:
    def __init__(self, progress: Progress, name: str, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(name, total=total, shown="")
        self._rewards, self._rollouts, self._errors = 0.0, 0, 0

    def add(self, row: ExampleRow) -> None:
        self._rewards += sum(rollout.reward for rollout in row.rollouts)
        self._rollouts += len(row.rollouts)
        self._errors += row.failure is not None
        shown = f"reward {self._rewards / self._rollouts:.3f}" if self._rollouts else ""
        errors = f" errors {self._errors}" if self._errors else ""
        self._progress.update(self._task, advance=1, shown=shown + errors)


@contextmanager
def progress_bar(name: str, rows: Sequence[ExampleRow], total: int) -> Iterator[Bar]:
    """Show a bar on stderr, which begins at the examples that earlier runs have finished."""
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = _RichBar(progress, name, total)
        for row in rows:
            bar.add(row)
        yield bar


def print_table(results: Sequence[Mapping[str, Any]]) -> None:
    """Print one line a result, and below it the means of the environments' own metrics.

    Args:
        results: summaries with `env`, and `version` where several were evaluated.
    """
    passes = sorted({key for result in results for key in result if key.startswith("pass@")}, key=_number)
    versions = any(result.get("version") is not None for result in results)
    titles = [*(["version"] if versions else []), "environment", "examples", "rollouts", "errors", "reward", *passes]
    table = Table(*titles, "truncated", "tokens")
    metrics = Table(*(["version"] if versions else []), "environment", "metric", "mean")
    for result in results:
        head = [str(result["version"])] if versions else []
        head.append(str(result["env"]))
        counts = [str(result[key]) for key in ("examples", "rollouts", "errors")]
        table.add_row(
            *head,
            *counts,
            _with_error(result["reward/mean"], result["reward/stderr"]),
            *(_shown(result.get(key)) for key in (*passes, "is_truncated/mean")),
            _shown(result["completion_len/mean"], 1),
        )
        for key in sorted(key for key in result if key.startswith("metrics/")):
            metrics.add_row(*head, key.removeprefix("metrics/"), _shown(result[key]))
    console = Console(markup=False)  # names are an environment's own
    if not console.is_terminal:
        console = Console(markup=False, width=_FILE_COLUMNS)
    console.print(table)
    if metrics.row_count:
        console.print(metrics)


def named(prefix: str, env: str, summary: Summary) -> Summary:
    """Give the values of a summary their names as metrics: `prefix/env/name`."""
    return {f"{prefix}/{env}/{key}": value for key, value in summary.items()}


def _with_error(value: float | None, error: float | None) -> str:
    return _shown(value) if error is None else f"{_shown(value)}±{error:.3f}"


def _shown(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _number(key: str) -> int:
    return int(key.partition("@")[2])
