"""The report of a benchmark: metrics/*.jsonl as a table, without the first step."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.table import Table

from prime_rl.configs.bench import WARMUP_STEPS
from prime_rl.liveness.parent_process import is_supervised
from prime_rl.monitors.metric_table import METRIC_TABLES
from prime_rl.storage.paths import RunPaths

_METRICS = {
    "trainer": "time/step time/wait_for_batch time/load_data time/train time/publish tokens perf/tokens_per_second "
    "perf/mfu perf/mfu_simple perf/peak_memory_gib",
    "orchestrator": "time/step perf/rollouts_per_second perf/tokens_per_second completion_len/mean seq_len/mean "
    "event_loop_lag/p99",
}


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


def benchmark_figures(paths: RunPaths, role: str) -> dict[str, dict[str, float]]:
    """Return the `mean`, `min` and `max` of each metric of `role` over the measured steps of a benchmark."""
    lines = [json.loads(line) for line in paths.metrics(role).read_text().splitlines()]
    steps = [line for line in lines if line["step"] >= WARMUP_STEPS]
    figures = {}
    for name in _METRICS[role].split():
        values = [step[name] for step in steps if step.get(name) is not None]
        if values:
            figures[name] = {"mean": float(np.mean(values)), "min": min(values), "max": max(values)}
    return figures


def _table(role: str, metrics: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(title=f"{role}, without the first step", title_justify="left")
    for column in ("metric", "mean", "min", "max", "unit"):
        table.add_column(column, justify="left" if column in ("metric", "unit") else "right")
    for name, values in metrics.items():
        metric = METRIC_TABLES[role].find(name)
        figures = (f"{values[key]:.4g}" for key in ("mean", "min", "max"))
        table.add_row(name, *figures, metric.unit if metric is not None else "")
    return table
