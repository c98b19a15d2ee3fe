"""What a benchmark says at its end: metrics/*.jsonl as a table, without the first step."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from prime_rl.configs.bench import WARMUP_STEPS
from prime_rl.run.paths import RunPaths
from prime_rl.supervisor.process import is_supervised

_ROWS = {
    "trainer": {
        "time/step": "s",
        "time/wait_for_batch": "s",
        "time/load_data": "s",
        "time/train": "s",
        "time/publish": "s",
        "tokens": "",
        "perf/tokens_per_second": "tokens/s",
        "perf/mfu": "",
        "perf/mfu_upstream": "",
        "perf/peak_memory_gib": "GiB",
    },
    "orchestrator": {
        "time/step": "s",
        "perf/rollouts_per_second": "1/s",
        "perf/tokens_per_second": "tokens/s",
        "completion_len/mean": "tokens",
        "seq_len/mean": "tokens",
        "event_loop_lag/p99": "s",
    },
}


@contextmanager
def benchmark(enabled: bool, paths: RunPaths, role: str) -> Iterator[None]:
    """Make room for a benchmark of `role`, and show its figures at the end; under `rl`, which does it for all, do not.

    Of several ranks rank 0 does it, before it joins the others.
    """
    leads = enabled and os.environ.get("RANK", "0") == "0"
    if leads:
        clear(paths, role)
    yield
    if leads and not is_supervised():
        report(paths, [role])


def clear(paths: RunPaths, role: str) -> None:
    """Remove what an earlier benchmark of `role` has left."""
    artifacts = {
        "trainer": [paths.weights_dir],
        "orchestrator": [paths.rollouts_dir, paths.ledger_dir, paths.spool_dir, paths.samples_dir],
    }
    for directory in artifacts[role]:
        shutil.rmtree(directory, ignore_errors=True)
    paths.metrics(role).unlink(missing_ok=True)


def report(paths: RunPaths, roles: Sequence[str], console: Console | None = None) -> Path:
    """Print a table a role and write the figures to `bench.json` of the run directory.

    Returns:
        That file: {role: {metric: {mean, min, max}}}.
    """
    console = console or Console(highlight=False, markup=False)
    figures = {role: summarise(paths, role) for role in roles}
    for role, metrics in figures.items():
        console.print(_table(role, metrics))
    if len(figures) > 1:
        console.print(_verdict(figures))
    target = paths.root / "bench.json"
    target.write_text(json.dumps(figures, indent=1) + "\n")
    console.print(f"figures in {target}", soft_wrap=True)
    return target


def summarise(paths: RunPaths, role: str) -> dict[str, dict[str, float]]:
    """Mean, least and largest of every metric over the steps that count."""
    lines = [json.loads(line) for line in paths.metrics(role).read_text().splitlines()]
    steps = [line for line in lines if line["step"] >= WARMUP_STEPS]
    figures = {}
    for name in _ROWS[role]:
        values = [step[name] for step in steps if step.get(name) is not None]
        if values:
            figures[name] = {"mean": float(np.mean(values)), "min": min(values), "max": max(values)}
    return figures


def _table(role: str, metrics: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(title=f"{role}, without the first step", title_justify="left")
    for column in ("metric", "mean", "min", "max", "unit"):
        table.add_column(column, justify="left" if column in ("metric", "unit") else "right")
    for name, values in metrics.items():
        table.add_row(name, *(f"{values[key]:.4g}" for key in ("mean", "min", "max")), _ROWS[role][name])
    return table


def _verdict(figures: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Put the two side by side, by what a batch costs each."""
    sampled, trained = figures["orchestrator"], figures["trainer"]
    return (
        f"a batch takes {sampled['time/step']['mean']:.3g} s to sample, and one of {trained['tokens']['mean']:,.0f} "
        f"random tokens (trainer.data.fake) {trained['time/step']['mean']:.3g} s to train and publish; in a run both "
        "work at the same time"
    )
