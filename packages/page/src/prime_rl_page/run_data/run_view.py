"""One run as the page sees it: reads its directory incrementally and answers the requests of the page."""

import math
import operator
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_rl.configs.loading.base_config import as_toml
from prime_rl.configs.loading.provenance import hide_secrets
from prime_rl.core.json_lines import FilePosition, read_between
from prime_rl.liveness.heartbeat_monitor import ENDED, FAILED, read_heartbeat
from prime_rl.monitors.figures import MAX_STEPS, Figure, FigureHistory
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.doctor.collect import contains_run, find_joined_runs, read_run_config
from prime_rl.supervisor.run_progress import ProcessActivities
from prime_rl_page.loss_surface import read_loss_surface
from prime_rl_page.run_data.metric_series import (
    PROCESSES,
    MetricFile,
    Series,
    decimated_series,
    describe_metric,
    efficiency,
    wait_share,
)
from prime_rl_page.run_data.rollout_detail import (
    RolloutNote,
    RolloutNotes,
    TokenTexts,
    prompt_history,
    rollout_detail,
    token_detail,
)
from prime_rl_page.run_data.run_health import RunHealth, first_problem, server_versions
from prime_rl_page.run_data.sample_index import EvaluationIndex, SampleFilter, SampleIndex, find_evaluations
from prime_rl_page.run_data.timeline_spans import Timeline

_MAX_UPDATE_BYTES = 2**20
_MIN_REFRESH_SECONDS = 0.2
_SEARCH_SECONDS = 0.4
_LOOK_SECONDS = 5.0
_RECENT_STEPS = 10
_USUAL_NAME = "outputs"
"""The default of `output_dir`."""
WAITS = {"trainer": "time/wait_for_batch", "orchestrator": "time/wait_for_policy"}
"""The metric of each process that says how long a step waited for the other one."""


class RunView:
    """A run directory. The methods may be called from several threads; each blocks for file operations only.

    Args:
        name: of the run in URLs, unique on the page.
        root: the run directory.

    Attributes:
        label: what the page calls it.
        is_trainer: the directory is that of a trainer of several runs.
        is_joined: such a trainer trains the run.
    """

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.paths, self.label = name, RunPaths(root), name
        self.is_trainer = self.is_joined = False
        self._metrics = {process: MetricFile(self.paths, process) for process in PROCESSES}
        self._samples = SampleIndex(self.paths)
        self._evaluations: dict[str, EvaluationIndex] = {}
        self._timeline = Timeline(self.paths)
        self._texts = TokenTexts(self.paths)
        self.notes = RolloutNotes(self.paths)
        self.health = RunHealth(self.paths)
        self._activities = ProcessActivities([self.paths])
        self._lock, self._sample_lock, self._timeline_lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._refreshed = -math.inf
        self._settings: tuple[tuple[float, ...], dict[str, Any]] = (), {}

    def describe(self) -> dict[str, Any]:
        """Name, label and directory of the run, as JSON."""
        root = str(self.paths.root)
        return {"name": self.name, "label": self.label, "root": root, "is_trainer": self.is_trainer}

    def has_left(self) -> bool:
        """Whether the run shares a trainer that has not taken it yet, or no longer trains it."""
        beat = read_heartbeat(self.paths.heartbeat("trainer_0"))
        return self.is_joined and (beat is None or beat.phase in (ENDED, FAILED))

    def refresh(self) -> None:
        """Read the new lines of the metrics."""
        with self._lock:
            if time.monotonic() - self._refreshed < _MIN_REFRESH_SECONDS:
                return
            for file in self._metrics.values():
                file.refresh()
            self._refreshed = time.monotonic()

    def settings(self) -> dict[str, Any]:
        """The resolved configuration, without secrets; {} if there is none."""
        changed = tuple(map(_changed, (self.paths.run_toml, self.paths.config("any").parent)))
        if changed != self._settings[0]:
            self._settings = changed, hide_secrets(read_run_config(self.paths))
        return self._settings[1]

    def settings_text(self) -> str:
        """The settings as TOML."""
        return as_toml(self.settings())

    def cursor(self) -> str:
        """Positions in the metric files up to which this object has read, for `updates`."""
        return ",".join(str(self._metrics[process].file.position) for process in PROCESSES)

    def overview(self) -> dict[str, Any]:
        """The headline figures, the names of all metrics with unit and meaning, and the cursor of `updates`."""
        self.refresh()
        files = self._metrics.values()
        with self._lock:
            return {
                "name": self.name,
                "root": str(self.paths.root),
                "headline": self._headline(),
                "metrics": list(self._describe_metrics()),
                "cursor": self.cursor(),
                "has_time": any(math.isfinite(one.times[-1]) for file in files for one in file.series.values()),
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
        """Revision counter of each view except the overview; increases with new data."""
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
        """Rollouts that match a filter, of the training batches or of an evaluation; see `SampleIndex.search`."""
        with self._sample_lock:
            evaluations = find_evaluations(self.paths)
            noted = {key[1:] for key in self.notes.read() if key[0] == evaluation}
            found = self._index(evaluation).search(wanted, position, count, _SEARCH_SECONDS, noted)
            return {**found, "evaluations": evaluations}

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
            note = self.notes.read().get((evaluation, step, group_id, rollout), {})
            detail["note"] = {"is_flagged": note.get("is_flagged") is True, "text": str(note.get("text", ""))}
            if evaluation is not None:
                return {**detail, "samples": [], "token_note": "Evaluations keep no tokens."}
            return detail | token_detail(self.paths, self._texts, step, group_id, rollout)

    def history(self, step: int, group_id: int, rollout: int, evaluation: str | None = None) -> list[dict[str, Any]]:
        """The replies to the prompt of a rollout over the steps; see `prompt_history`."""
        with self._sample_lock:
            index = self._index(evaluation)
            index.refresh(_SEARCH_SECONDS)
            return prompt_history(index, step, group_id, rollout)

    def add_note(self, note: RolloutNote) -> bool:
        """Write the note of a rollout; see `RolloutNotes.write`."""
        with self._sample_lock:
            return self.notes.write(note, self._index(note.evaluation))

    def _index(self, evaluation: str | None) -> SampleIndex:
        """The rollouts of the training batches, or of a folder of `find_evaluations`; an unknown one is empty."""
        if evaluation is None or evaluation not in find_evaluations(self.paths):
            return self._samples if evaluation is None else EvaluationIndex(self.paths, "")
        if evaluation not in self._evaluations:
            self._evaluations[evaluation] = EvaluationIndex(self.paths, evaluation)
        return self._evaluations[evaluation]

    def timeline(self, begin: float | None, end: float | None, num_pixels: int) -> dict[str, Any]:
        """Lanes and events of a time window. Totals of the whole run are those of the steps of the bottleneck."""
        latest = (self.health.latest() or {}) if begin is end is None else {}
        with self._timeline_lock:
            self._timeline.refresh()
            return self._timeline.window(begin, end, num_pixels, latest.get("bottleneck_window"))

    def read_timeline(self) -> Timeline:
        """Return the timeline with all phases on disk."""
        with self._timeline_lock:
            self._timeline.refresh()
            return self._timeline

    def read_metrics(self) -> Mapping[str, MetricFile]:
        """Return the metric file of each process, with all lines on disk."""
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
        max_steps = None if self.is_trainer else settings.get("max_steps")
        steps = trainer["time/step"].steps if "time/step" in trainer else []
        done = int(steps[-1]) + 1 if steps else 0
        step_seconds = self._recent("trainer", "time/step")
        wait_seconds = self._recent("trainer", "time/wait_for_batch")
        left = max(0, max_steps - done) if isinstance(max_steps, int) else None
        diagnosis = self.health.latest() or {}
        # The steps of an earlier start do not count.
        is_starting = not done or trainer["time/step"].times[-1] < self._activities.newest_start
        return {
            "state": diagnosis.get("state"),
            "healthy": diagnosis.get("healthy"),
            "problem": first_problem(diagnosis),
            "findings": diagnosis.get("findings", []),
            "bottleneck": diagnosis.get("bottleneck"),
            "bottleneck_is_large": diagnosis.get("bottleneck_is_large", False),
            "activities": []
            if not is_starting or diagnosis.get("state") not in (None, "running")
            else [
                {"who": one.who, "phase": one.phase, "seconds": round(one.seconds), "waiting_for": one.waiting_for}
                for one in self._activities.read()
            ],
            "num_damaged": sum(file.file.num_damaged for file in self._metrics.values()),
            "steps": done,
            "max_steps": max_steps if isinstance(max_steps, int) else None,
            "reward": shipped.get("reward/mean"),
            "loss": trained.get("loss"),
            "runs_active": trained.get("runs/active"),
            "runs_waiting": trained.get("runs/waiting"),
            "staleness_mean": shipped.get("staleness/mean"),
            "staleness_max": shipped.get("staleness/max"),
            "staleness_bound": bound if isinstance(bound, int) else None,
            "tokens_per_second": self._recent_rate("orchestrator", "time/step"),
            "trained_tokens_per_second": self._recent_rate("trainer", "time/train"),
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
        values = series.values[-_RECENT_STEPS:] if series is not None else []
        return sum(values) / len(values) if values else None

    def _recent_rate(self, process: str, seconds_name: str) -> float | None:
        """Tokens per second of the recent steps together: their mean would count short steps like long ones."""
        columns = (self._metrics[process].series.get(name) for name in ("perf/tokens_per_second", seconds_name))
        rates, seconds = ([] if one is None else one.values[-_RECENT_STEPS:] for one in columns)
        total = sum(seconds)
        return sum(map(operator.mul, rates, seconds)) / total if total and rates else None

    def _describe_metrics(self) -> Iterator[dict[str, Any]]:
        for process, file in self._metrics.items():
            for name, series in file.series.items():
                metric = describe_metric(process, name)
                yield {
                    "name": f"{process}:{name}", "unit": metric.unit if metric else "",
                    "meaning": metric.meaning if metric else "", "count": len(series),
                }  # fmt: skip


class RunList:
    """The runs in some directories, also those that appear later. Thread-safe.

    A run directory is followed by the runs that share its trainer. Another directory stands for the runs directly below
    it. The label of directories with the same name is the shortest end of their paths that differs; that of the usual
    name, which runs on other pages have too, includes the directory above.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories, self._lock = directories, threading.Lock()
        self._views: dict[Path, RunView] = {}
        self._looked = -math.inf

    def read(self) -> list[RunView]:
        """Return the runs in the order in which they were found, each with a unique name; looks every few seconds."""
        with self._lock:
            if time.monotonic() - self._looked > _LOOK_SECONDS:
                self._look()
                self._looked = time.monotonic()
            return list(self._views.values())

    def find(self, name: str) -> RunView | None:
        """Return the run of a name; None if there is none."""
        return next((run for run in self.read() if run.name == name), None)

    def describe(self) -> list[dict[str, Any]]:
        """Return the runs as JSON."""
        return [run.describe() for run in self.read()]

    def _look(self) -> None:
        joined = {root: find_joined_runs(RunPaths(root)) for one in self._directories for root in _roots(one)}
        below = {run.root for runs in joined.values() for run in runs}
        roots = list(dict.fromkeys(path for root, runs in joined.items() for path in (root, *(r.root for r in runs))))
        # A trainer that starts again has no heartbeat for a moment.
        kept = (view for view in self._views.values() if view.is_joined and view.paths.root.is_dir())
        roots = list(dict.fromkeys([*roots, *(view.paths.root for view in kept)]))
        self._views = {root: view for root, view in self._views.items() if root in roots}
        for root in roots:
            base, names = root.resolve().name or "run", {view.name for view in self._views.values()}
            if root not in self._views:
                unused = (one for one in chain([base], (f"{base}-{i}" for i in count(2))) if one not in names)
                self._views[root] = RunView(next(unused), root)
            view, label = self._views[root], _label(root, roots)
            view.is_trainer |= bool(joined.get(root))
            view.is_joined |= root in below
            view.label = f"{label} (trainer)" if view.is_trainer else label


def _roots(directory: Path) -> list[Path]:
    if contains_run(RunPaths(directory)) or not directory.is_dir():
        return [directory]
    below = [path for path in sorted(directory.iterdir()) if path.is_dir() and contains_run(RunPaths(path))]
    return below or [directory]


def _label(root: Path, roots: Sequence[Path]) -> str:
    """Return the shortest end of the path of `root` that no other path has, longer than the usual name."""
    own, others = root.resolve(), {other.resolve().parts for other in roots} - {root.resolve().parts}
    for length in range(2 if own.name == _USUAL_NAME else 1, len(own.parts)):
        if not any(parts[-length:] == own.parts[-length:] for parts in others):
            return str(Path(*own.parts[-length:]))
    return str(own)


def _changed(path: Path) -> float:
    """Return when a file or folder was changed, in Unix seconds; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


_LAYER = re.compile(r"grad_norm/layer_\d+")


def run_figures(
    paths: RunPaths, settings: Mapping[str, Any], series: Mapping[str, Series], entries: NDArray[np.void]
) -> dict[str, Figure]:
    """Return the figures that the run allows, by name; of a long run, at most `MAX_STEPS` steps at equal distances.

    Args:
        settings: the contents of run.toml.
        series: metrics of the trainer.
        entries: the index of all rollouts, in order of the steps.
    """
    history = FigureHistory(pass_threshold(settings))
    for step, norms in _gradient_norms(series).items():
        history.add_metrics(step, norms)
    for step, rollouts in _by_step(entries).items():
        groups = defaultdict(list)
        for key, reward in zip(rollouts[["env", "group_id"]].tolist(), rollouts["reward"].tolist(), strict=True):
            groups[key].append(reward)
        advantages = rollouts["advantage"]
        known = advantages[np.isfinite(advantages)].tolist()
        history.add_rollouts(step, rollouts["reward"].tolist(), known, list(groups.values()))
    found = history.figures()
    if (surface := read_loss_surface(paths)) is not None:
        found["loss_surface"] = surface.figure()
    return found


def pass_threshold(settings: Mapping[str, Any]) -> float:
    """Return the reward from which a rollout of the run with this run.toml solves its example."""
    orchestrator = settings.get("orchestrator")
    value = orchestrator.get("pass_threshold") if isinstance(orchestrator, Mapping) else None
    return float(value) if isinstance(value, int | float) else 1.0


def _gradient_norms(series: Mapping[str, Series]) -> dict[int, dict[str, float]]:
    norms: dict[int, dict[str, float]] = {}
    for name, one in series.items():
        if _LAYER.fullmatch(name):
            for step, value in zip(one.steps, one.values, strict=True):
                norms.setdefault(int(step), {})[name] = value
    return {step: norms[step] for step in _evenly(sorted(norms))}


def _by_step(entries: NDArray[np.void]) -> dict[int, NDArray[np.void]]:
    """The rollouts with a reward of each chosen step."""
    entries = entries[np.isfinite(entries["reward"])]
    steps, starts = np.unique(entries["step"], return_index=True)
    ends = np.append(starts[1:], len(entries))
    chosen = set(_evenly(steps.tolist()))
    return {
        int(step): entries[start:end] for step, start, end in zip(steps, starts, ends, strict=True) if step in chosen
    }


def _evenly(steps: list[int]) -> list[int]:
    count = min(len(steps), MAX_STEPS)
    return [steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)]
