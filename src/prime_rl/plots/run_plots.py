"""The figures of a run directory, as one HTML file."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prime_rl.plots.figure_history import FigureHistory
from prime_rl.plots.figures import Figure
from prime_rl.storage.paths import RunPaths

_SAMPLES = re.compile(r"step_(\d+)\.jsonl")


def pass_threshold(settings: Mapping[str, Any]) -> float:
    """Return the reward from which a rollout of the run with this run.toml solves its example."""
    orchestrator = settings.get("orchestrator")
    value = orchestrator.get("pass_threshold") if isinstance(orchestrator, Mapping) else None
    return float(value) if isinstance(value, int | float) else 1.0


def read_history(paths: RunPaths, pass_threshold: float = 1.0) -> FigureHistory:
    """Read what the figures need from metrics/trainer.jsonl and samples/; incomplete lines are skipped."""
    history = FigureHistory(pass_threshold)
    for row in _read_lines(paths.metrics("trainer")):
        history.add_metrics(row["step"], row)
    files = {int(match[1]): file for file in _files(paths.samples_dir) if (match := _SAMPLES.fullmatch(file.name))}
    for step, file in sorted(files.items()):
        history.add_samples(step, list(_read_lines(file)))
    return history


def write_html(figures: Mapping[str, Figure], target: Path) -> None:
    """Write figures into one HTML file that needs no network. Raises OSError if it cannot be written."""
    from plotly.io import to_html  # an optional package

    parts = [
        to_html(figure, full_html=False, include_plotlyjs=index == 0, div_id=name, validate=False)
        for index, (name, figure) in enumerate(figures.items())
    ]
    head = '<!doctype html><html><head><meta charset="utf-8"><title>Figures</title></head>'
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f"{head}<body>{''.join(parts)}</body></html>\n")


def _files(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _read_lines(file: Path) -> Iterator[dict[str, Any]]:
    if not file.exists():
        return
    with file.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield json.loads(line)
