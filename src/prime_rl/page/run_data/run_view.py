"""One run as the page sees it: reads its directory incrementally and answers the requests of the page."""

import math
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_rl.doctor.collect import contains_run, read_toml
from prime_rl.page.run_data.evaluation_index import EvaluationIndex, find_evaluations
from prime_rl.page.run_data.json_lines import FilePosition, read_between
from prime_rl.page.run_data.metric_series import (
    PROCESSES,
    MetricFile,
    Series,
    decimated_series,
    describe_metric,
    efficiency,
    wait_share,
)
from prime_rl.page.run_data.rollout_detail import TokenTexts, rollout_detail, token_detail
from prime_rl.page.run_data.run_figures import run_figures
from prime_rl.page.run_data.run_health import RunHealth, server_versions
from prime_rl.page.run_data.sample_index import SampleFilter, SampleIndex
from prime_rl.page.run_data.timeline_spans import Timeline
from prime_rl.plots.figures import Figure
from prime_rl.storage.paths import RunPaths

_MAX_UPDATE_BYTES = 2**20
_MIN_REFRESH_SECONDS = 0.2
_SEARCH_SECONDS = 0.4
_RECENT_STEPS = 10
WAITS = {"trainer": "time/wait_for_batch", "orchestrator": "time/wait_for_policy"}
"""The metric of each process that says how long a step waited for the other one."""


class RunView:
    """A run directory. The methods may be called from several threads; each blocks for file operations only.

    Args:
        name: of the run in URLs, unique on the page.
        root: the run directory.
    """

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.paths = name, RunPaths(root)
        self._metrics = {process: MetricFile(self.paths, process) for process in PROCESSES}
        self._samples = SampleIndex(self.paths)
        self._evaluations: dict[str, EvaluationIndex] = {}
        self._timeline = Timeline(self.paths)
        self._texts = TokenTexts(self.paths)
        self.health = RunHealth(self.paths)
        self._lock, self._sample_lock, self._timeline_lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._refreshed = -math.inf
        self._settings: tuple[float, dict[str, Any]] = (-1.0, {})

    def refresh(self) -> None:
        """Read the new lines of the metrics."""
        with self._lock:
            if time.monotonic() - self._refreshed < _MIN_REFRESH_SECONDS:
                return
            for file in self._metrics.values():
                file.refresh()
            self._refreshed = time.monotonic()

    def settings(self) -> dict[str, Any]:
        """The resolved configuration in run.toml; {} if there is none."""
        try:
            changed = self.paths.run_toml.stat().st_mtime
        except OSError:
            return {}
        if changed != self._settings[0]:
            self._settings = changed, read_toml(self.paths.run_toml)
        return self._settings[1]

    def cursor(self) -> str:
        """Positions in the metric files up to which this object has read, for `updates`."""
        return ",".join(str(self._metrics[process].file.position) for process in PROCESSES)

    def overview(self) -> dict[str, Any]:
        """The headline figures, the names of all metrics with unit and meaning, and the cursor of `updates`."""
        self.refresh()
        with self._lock:
            return {
                "name": self.name,
                "root": str(self.paths.root),
                "headline": self._headline(),
                "metrics": list(self._describe_metrics()),
                "cursor": self.cursor(),
                "has_time": any(self._has_time(file) for file in self._metrics.values()),
            }

    def series(self, names: list[str], max_points: int) -> dict[str, Any]:
        """Decimated series by `process:name`; unknown names are omitted."""
        self.refresh()
        with self._lock:
            found = {}
            for full in names:
                if (series := self._find(full)) is not None and len(series):
                    found[full] = decimated_series(series, max_points)
            return {"series": found, "cursor": self.cursor()}

    def updates(self, cursor: str) -> dict[str, Any] | None:
        """The metric lines after a cursor, and the new cursor; None if the page must load the series again."""
        self.refresh()
        positions = [FilePosition.parse(text) for text in cursor.split(",")]
        if len(positions) != len(PROCESSES):
            return None
        rows: list[dict[str, Any]] = []
        with self._lock:
            for process, begin in zip(PROCESSES, positions, strict=True):
                file = self._metrics[process]
                end = file.file.position
                begin = FilePosition(end.inode, 0) if begin == FilePosition() else begin
                found = read_between(file.file.path, begin, end, _MAX_UPDATE_BYTES) if begin != end else []
                if found is None:
                    return None
                for row in found:
                    values = dict(file.select(row))
                    rows.append(
                        {"process": process, "step": row.get("step"), "time": row.get("time"), "values": values}
                    )
            return {"rows": rows, "cursor": self.cursor()}

    def counts(self) -> dict[str, Any]:
        """Numbers that change when a view other than the overview has something new."""
        with self._sample_lock:
            self._samples.refresh(0)
            steps = self._samples.steps
        with self._timeline_lock:
            self._timeline.refresh()
            return {
                "phases": self._timeline.num_spans, "events": len(self._timeline.events),
                "sample_files": len(steps), "newest_samples": steps[-1] if steps else None,
            }  # fmt: skip

    def headline(self) -> dict[str, Any]:
        """The figures at the top of the page."""
        with self._lock:
            return self._headline()

    def search(self, wanted: SampleFilter, position: int, count: int, evaluation: str | None = None) -> dict[str, Any]:
        """Rollouts that match a filter, of the training batches or of an evaluation; see `SamplePage`."""
        with self._sample_lock:
            evaluations = find_evaluations(self.paths)
            index = self._index(evaluation)
            page = index.search(wanted, position, count, _SEARCH_SECONDS)
            return {
                "rows": page.rows, "num_matching": page.num_matching, "next_position": page.next_position,
                "num_files": page.num_files, "num_indexed": page.num_indexed, "num_damaged": index.num_damaged,
                "envs": sorted(index.env_names), "evaluations": evaluations,
            }  # fmt: skip

    def read_samples(self) -> NDArray[np.void]:
        """The index of all rollouts; see `SampleIndex`. Reads all sample files."""
        with self._sample_lock:
            self._samples.refresh(math.inf)
            return self._samples.entries()

    def figures(self) -> dict[str, Figure]:
        """The figures of the run by name; see `run_figures`. Reads all sample files."""
        entries = self.read_samples()
        self.refresh()
        with self._lock:
            return run_figures(self.paths, self.settings(), self._metrics["trainer"].series, entries)

    def rollout(self, step: int, group_id: int, rollout: int, evaluation: str | None = None) -> dict[str, Any] | None:
        """One rollout with its group, and its tokens if it was trained on; None if it does not exist."""
        with self._sample_lock:
            detail = rollout_detail(self._index(evaluation), step, group_id, rollout)
            if detail is None:
                return None
            if evaluation is not None:
                return {**detail, "samples": [], "token_note": "Evaluations keep no tokens."}
            return detail | token_detail(self.paths, self._texts, step, group_id, rollout)

    def _index(self, evaluation: str | None) -> SampleIndex:
        """The rollouts of the training batches, or of a folder of `find_evaluations`; an unknown one is empty."""
        if evaluation is None or evaluation not in find_evaluations(self.paths):
            return self._samples if evaluation is None else EvaluationIndex(self.paths, "")
        if evaluation not in self._evaluations:
            self._evaluations[evaluation] = EvaluationIndex(self.paths, evaluation)
        return self._evaluations[evaluation]

    def timeline(self, begin: float | None, end: float | None, num_pixels: int) -> dict[str, Any]:
        """Lanes and events of a time window."""
        with self._timeline_lock:
            self._timeline.refresh()
            return self._timeline.window(begin, end, num_pixels)

    def read_timeline(self) -> Timeline:
        """The whole timeline."""
        with self._timeline_lock:
            self._timeline.refresh()
            return self._timeline

    def read_metrics(self) -> Mapping[str, MetricFile]:
        """All metrics by process."""
        self.refresh()
        return self._metrics

    def read_health(self) -> dict[str, Any]:
        """The diagnosis of `doctor`, and the version of each server."""
        diagnosis = self.health.read()
        self.refresh()
        timeline = self.read_timeline()
        with self._lock:
            return {**diagnosis, "servers": server_versions(timeline, self._latest("orchestrator"))}

    def _headline(self) -> dict[str, Any]:
        settings, trainer = self.settings(), self._metrics["trainer"].series
        shipped, trained = self._latest("orchestrator"), self._latest("trainer")
        orchestrator = settings.get("orchestrator")
        off_policy = orchestrator.get("max_off_policy_steps") if isinstance(orchestrator, dict) else None
        bound = off_policy if isinstance(off_policy, int) else settings.get("async_level")
        max_steps = settings.get("max_steps")
        steps = trainer["time/step"].steps if "time/step" in trainer else []
        done = int(steps[-1]) + 1 if steps else 0
        step_seconds = self._recent("trainer", "time/step")
        wait_seconds = self._recent("trainer", "time/wait_for_batch")
        left = max(0, max_steps - done) if isinstance(max_steps, int) else None
        diagnosis = self.health.latest() or {}
        return {
            "state": diagnosis.get("state"),
            "healthy": diagnosis.get("healthy"),
            "num_damaged": sum(file.file.num_damaged for file in self._metrics.values()),
            "steps": done,
            "max_steps": max_steps if isinstance(max_steps, int) else None,
            "reward": shipped.get("reward/mean"),
            "loss": trained.get("loss"),
            "staleness_mean": shipped.get("staleness/mean"),
            "staleness_max": shipped.get("staleness/max"),
            "staleness_bound": bound if isinstance(bound, int) else None,
            "tokens_per_second": self._recent("orchestrator", "perf/tokens_per_second"),
            "trained_tokens_per_second": self._recent("trainer", "perf/tokens_per_second"),
            "step_seconds": step_seconds,
            "trainer_wait_share": wait_seconds / step_seconds if wait_seconds is not None and step_seconds else None,
            "eta_seconds": left * step_seconds if left is not None and step_seconds is not None else None,
        }

    def _find(self, full: str) -> Series | None:
        """The series `process:name`; `wait_share:process` and `efficiency:run` are computed from others."""
        process, _, name = full.partition(":")
        if process == "efficiency":
            trainer, orchestrator = self._find("wait_share:trainer"), self._find("wait_share:orchestrator")
            return efficiency(trainer, orchestrator) if trainer is not None and orchestrator is not None else None
        if process == "wait_share":
            waiting = WAITS.get(name)
            wait = self._metrics[name].series.get(waiting) if waiting is not None else None
            seconds = self._metrics[name].series.get("time/step") if waiting is not None else None
            return wait_share(wait, seconds) if wait is not None and seconds is not None else None
        return self._metrics[process].series.get(name) if process in self._metrics else None

    def _latest(self, process: str) -> dict[str, float]:
        return {name: series.values[-1] for name, series in self._metrics[process].series.items() if len(series)}

    def _recent(self, process: str, name: str) -> float | None:
        series = self._metrics[process].series.get(name)
        values = series.last(_RECENT_STEPS) if series is not None else []
        return sum(values) / len(values) if values else None

    def _has_time(self, file: MetricFile) -> bool:
        return any(math.isfinite(series.times[-1]) for series in file.series.values() if len(series))

    def _describe_metrics(self) -> Iterator[dict[str, Any]]:
        for process, file in self._metrics.items():
            for name, series in file.series.items():
                metric = describe_metric(process, name)
                yield {
                    "name": f"{process}:{name}", "unit": metric.unit if metric else "",
                    "meaning": metric.meaning if metric else "", "count": len(series),
                }  # fmt: skip


def find_runs(directories: list[Path]) -> list[RunView]:
    """Open each run directory, and those directly below a directory that is none. Names are unique."""
    roots: list[Path] = []
    for directory in directories:
        if contains_run(RunPaths(directory)) or not directory.is_dir():
            roots.append(directory)
            continue
        below = [path for path in sorted(directory.iterdir()) if path.is_dir() and contains_run(RunPaths(path))]
        roots += below or [directory]
    names: dict[str, int] = {}
    views = []
    for root in roots:
        base = root.resolve().name or "run"
        names[base] = names.get(base, 0) + 1
        views.append(RunView(base if names[base] == 1 else f"{base}-{names[base]}", root))
    return views
