"""The report of a benchmark: metrics/*.jsonl as a table, without the first step."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from prime_rl.liveness.parent_process import is_supervised
from prime_rl.monitors.bench_figures import benchmark_figures
from prime_rl.monitors.monitor import METRIC_TABLES
from prime_rl.storage.paths import RunPaths


@contextmanager
def report_benchmark(enabled: bool, paths: RunPaths, role: str) -> Iterator[None]:
    """On rank 0, remove the results of an earlier benchmark of `role`; at the end print a report unless `rl` does."""
    is_main = enabled and os.environ.get("RANK", "0") == "0"
    if is_main:
        artifacts = {
            "trainer": [paths.weights_dir],
            "orchestrator": [paths.rollouts_dir, paths.ledger_dir, paths.spool_dir, paths.samples_dir],
        }
        for directory in artifacts[role]:
            shutil.rmtree(directory, ignore_errors=True)
        paths.metrics(role).unlink(missing_ok=True)
    yield
    if is_main and not is_supervised():
        print_bench_report(paths, [role])


def print_bench_report(paths: RunPaths, roles: Sequence[str], console: Console | None = None) -> None:
    """Print one table per role and write {role: {metric: {mean, min, max}}} to `bench.json` in the run directory."""
    console = console or Console(highlight=False, markup=False)
    figures = {role: benchmark_figures(paths, role) for role in roles}
    for role, metrics in figures.items():
        console.print(_table(role, metrics))
    if len(figures) > 1:
        sampled, trained = figures["orchestrator"], figures["trainer"]
        console.print(
            f"a batch takes {sampled['time/step']['mean']:.3g} s to sample, and one of "
            f"{trained['tokens']['mean']:,.0f} random tokens (trainer.data.fake) {trained['time/step']['mean']:.3g} s "
            "to train and publish; in a run both happen at the same time"
        )
    target = paths.root / "bench.json"
    target.write_text(json.dumps(figures, indent=1) + "\n")
    console.print(f"figures in {target}", soft_wrap=True)


def _table(role: str, metrics: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(title=f"{role}, without the first step", title_justify="left")
    for column in ("metric", "mean", "min", "max", "unit"):
        table.add_column(column, justify="left" if column in ("metric", "unit") else "right")
    for name, values in metrics.items():
        metric = METRIC_TABLES[role].find(name)
        figures = (f"{values[key]:.4g}" for key in ("mean", "min", "max"))
        table.add_row(name, *figures, metric.unit if metric is not None else "")
    return table
