"""Reads the state of a run from its directory and from this node's kernel. Changes nothing and judges nothing.

The directory can be incomplete, of an older version, or damaged: unreadable parts are omitted or None.
"""

import os
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from prime_rl.configs.rl import RLConfig
from prime_rl.core.entry_point import read_error_file
from prime_rl.core.json_lines import decode_object
from prime_rl.liveness.heartbeat_monitor import LivenessReport, read_heartbeats
from prime_rl.liveness.run_settings import MAX_RUNS
from prime_rl.monitors.bottleneck import SpeedSettings, speed_settings
from prime_rl.monitors.slow_rank import find_slow_rank
from prime_rl.storage.artifact import ArtifactError
from prime_rl.storage.checkpoint_artifacts import (
    CheckpointCommit,
    CheckpointListing,
    ResumeRecord,
    find_checkpoints,
    read_resume,
)
from prime_rl.storage.file_locks import find_lock_holders
from prime_rl.storage.paths import RUN_FOLDER, RunPaths, steps_in
from prime_rl.storage.rollback import has_earlier_run

ROLES = ("trainer", "orchestrator", "inference")
_TAIL_BYTES = 2**18
_METRICS_BYTES = 2**22
Value = TypeVar("Value")
Default = TypeVar("Default")


@dataclass(frozen=True, slots=True)
class StoppedProcess:
    """A process of the run that a debugger traces, or that received SIGSTOP; named `role/pid` without a heartbeat."""

    pid: int
    name: str
    command: str
    traced: bool


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes of the file system, of each folder of the run (largest first), and of the newest version and checkpoint."""

    free: int
    total: int
    used: dict[str, int]
    version: int = 0
    checkpoint: int = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings from `run.toml`, None if unknown; `host_environments` may execute model output on the machine."""

    max_steps: int | None = None
    async_level: int | None = None
    ckpt: str | None = None
    """Folder of the checkpoints."""
    host_environments: tuple[str, ...] = ()
    speed: SpeedSettings = field(default_factory=SpeedSettings)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The state of a run at one moment.

    Attributes:
        now: Unix seconds, used only to display ages.
        watched_seconds: how long the heartbeats were observed.
        reports: of the processes with a heartbeat, by name.
        stopped: processes on this node that are stopped or traced.
        owner: process id of the `rl` on this node that holds the lock of the directory.
        warnings: of `warnings.jsonl`, in order.
        events: of `events.jsonl`, in order.
        trained: latest metrics of the trainer.
        slow_rank: hint at a rank of the trainer for which the others wait.
        batches: latest lines of the orchestrator's metrics, in order.
        lines: by role, the latest lines of its metrics, in order; with those of evaluations.
        version: newest published version.
        checkpoints: complete ones, ascending.
        broken: other entries of the checkpoint folder, with the problem of each.
        errors: role -> its error message.
        refused, evicted: why the trainer of several runs does not take this one, or has stopped it.
    """

    root: Path
    now: float = 0.0
    watched_seconds: float = 0.0
    reports: tuple[LivenessReport, ...] = ()
    stopped: tuple[StoppedProcess, ...] = ()
    owner: int | None = None
    warnings: tuple[Mapping[str, Any], ...] = ()
    events: tuple[Mapping[str, Any], ...] = ()
    trained: Mapping[str, Any] | None = None
    slow_rank: str | None = None
    batches: tuple[Mapping[str, Any], ...] = ()
    lines: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    version: int | None = None
    checkpoints: tuple[CheckpointCommit, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    resume: ResumeRecord | None = None
    errors: Mapping[str, str] = field(default_factory=dict)
    disk: Disk | None = None
    settings: Settings = field(default_factory=Settings)
    refused: str | None = None
    evicted: str | None = None

    @property
    def shipped(self) -> Mapping[str, Any]:
        """Latest metrics of the orchestrator; {} if there are none."""
        return self.batches[-1] if self.batches else {}


def contains_run(paths: RunPaths) -> bool:
    """Whether a run has left anything in the directory."""
    files = [paths.run_toml, paths.events, paths.refused, paths.evicted, paths.error("orchestrator")]
    return any(file.is_file() for file in (*files, *paths.heartbeats_dir.glob("*.json"))) or has_earlier_run(paths)


def find_joined_runs(paths: RunPaths) -> list[RunPaths]:
    """Return the runs that share the trainer of this directory, by name; [] unless it is one of several runs."""
    if all(beat.settings.get(MAX_RUNS, 1) == 1 for beat in read_heartbeats(paths, ("trainer",)).values()):
        return []
    folders = sorted(path for path in paths.root.iterdir() if RUN_FOLDER.fullmatch(path.name) and path.is_dir())
    runs = map(RunPaths, folders)
    return [run for run in runs if run.config("orchestrator").is_file() or contains_run(run)]


def read_facts(paths: RunPaths, reports: tuple[LivenessReport, ...], now: float, watched_seconds: float) -> RunFacts:
    """Read a run's directory, and ask the kernel for its processes on this node; arguments as in `RunFacts`."""
    settings = read_settings(paths)
    events = tuple(_json_lines(paths.events))
    versions = steps_in(paths.weights_dir)
    checkpoints_dir = paths.root / settings.ckpt if settings.ckpt else paths.checkpoints_dir
    try:
        found = find_checkpoints(checkpoints_dir)
    except OSError as reason:
        found = CheckpointListing((), {checkpoints_dir.name: f"cannot be read: {reason.strerror}"})
    lines = {
        role: tuple(line for line in _json_lines(paths.metrics(role), _METRICS_BYTES) if type(line.get("step")) is int)
        for role in ("trainer", "orchestrator")
    }
    trained, batches = (  # the other lines are those of validations and evaluations
        tuple(line for line in lines[role] if name in line)
        for role, name in (("trainer", "time/step"), ("orchestrator", "reward/mean"))
    )
    return RunFacts(
        paths.root,
        now,
        watched_seconds,
        reports,
        stopped=tuple(_stopped(reports, events)),
        owner=next(iter(find_lock_holders(paths.lock)), None),
        warnings=tuple(_json_lines(paths.warnings)),
        events=events,
        trained=trained[-1] if trained else None,
        slow_rank=find_slow_rank(trained, {report.name: report.heartbeat.host for report in reports}),
        batches=batches,
        lines=lines,
        version=versions[-1] if versions else None,
        checkpoints=found.complete,
        broken=found.broken,
        resume=_read_or(None, lambda: read_resume(checkpoints_dir)),
        errors={role: error.message for role in ROLES if (error := read_error_file(paths.error(role))) is not None},
        disk=_disk(paths, versions[-1:], [checkpoints_dir / f"step_{step}" for step in found.steps[-1:]]),
        settings=settings,
        refused=_read_or(None, lambda: paths.refused.read_text().strip()),
        evicted=_read_or(None, lambda: paths.evicted.read_text().strip()),
    )


def read_settings(paths: RunPaths) -> Settings:
    """Read the relevant keys of the resolved configuration."""
    config = read_run_config(paths)
    steps, level, ckpt = config.get("max_steps"), config.get("async_level"), config.get("ckpt")
    orchestrator = config.get("orchestrator")
    orchestrator = orchestrator if isinstance(orchestrator, dict) else {}
    blocks = [orchestrator.get("env")]
    tables = [table for block in blocks if isinstance(block, list) for table in block if isinstance(table, dict)]
    return Settings(
        steps if isinstance(steps, int) else None,
        level if isinstance(level, int) else None,
        str(ckpt.get("path", "checkpoints")) if isinstance(ckpt, dict) else None,
        tuple(str(table.get("name") or table.get("id")) for table in tables if table.get("runtime") == "subprocess"),
        speed_settings(config),
    )


def read_run_config(paths: RunPaths) -> dict[str, Any]:
    """Return the resolved configuration of `rl`; of processes that were started separately, theirs in its form.

    Returns {} if there is none.
    """
    if config := read_toml(paths.run_toml):
        return config
    roles = {role: found for role in ("trainer", "orchestrator") if (found := read_toml(paths.config(role)))}
    shared = {key: value for found in roles.values() for key, value in found.items() if key in RLConfig.model_fields}
    return {**shared, **roles} or read_toml(paths.config("sft"))


def read_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file; {} if it cannot be read."""
    return _read_or({}, lambda: tomllib.loads(file.read_text()))


def _read_or(default: Default, read: Callable[[], Value]) -> Value | Default:
    """Return the result of `read`, or `default` if the file or folder is missing or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, ArtifactError):
        return read()
    return default


def _stopped(reports: tuple[LivenessReport, ...], events: tuple[Mapping[str, Any], ...]) -> Iterator[StoppedProcess]:
    """Find stopped processes among those with a heartbeat on this node, and their descendants."""
    local = {v.heartbeat.pid: v.name for v in reports if v.is_local}
    processes: dict[int, psutil.Process] = {}
    for pid in local:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            processes |= {p.pid: p for p in (process, *process.children(recursive=True))}
    of_rl = events if "rl" in local.values() else ()  # the process ids of another host's `rl` are invalid here
    started = {event.get("pid"): str(event.get("name")) for event in of_rl if event.get("event") == "started"}
    for pid, process in sorted(processes.items()):
        with suppress(psutil.Error):
            status = process.status()
            if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                parent = next((local[parent.pid] for parent in process.parents() if parent.pid in local), "?")
                words = [Path(word).name if word.startswith("/") else word for word in process.cmdline()]
                name = local.get(pid) or started.get(pid) or f"{parent}/{pid}"
                command = " ".join(words)[:80] or process.name()
                yield StoppedProcess(pid, name, command, status == psutil.STATUS_TRACING_STOP)


def _json_lines(file: Path, most_bytes: int = _TAIL_BYTES) -> Iterator[Mapping[str, Any]]:
    """The objects of the last lines of a file, without an incomplete last line."""
    with suppress(OSError), file.open("rb") as content:
        begin = max(0, content.seek(0, os.SEEK_END) - most_bytes)
        content.seek(begin)
        for line in content.read().splitlines(keepends=True)[1 if begin else 0 :]:
            if line.endswith(b"\n") and (row := decode_object(line)) is not None:
                yield row


def _disk(paths: RunPaths, versions: list[int], checkpoints: list[Path]) -> Disk | None:
    if (space := _read_or(None, lambda: shutil.disk_usage(paths.root))) is None:
        return None
    sizes = sorted(((_size(entry), entry.name) for entry in paths.root.iterdir()), reverse=True)
    version = sum(_size(paths.weights(step).resolve()) for step in versions)
    used = {name: size for size, name in sizes if size}
    return Disk(space.free, space.total, used, version, sum(map(_size, checkpoints)))


def _size(path: Path) -> int:
    """Bytes of a file or folder, without the targets of links and files that are removed meanwhile."""
    if not path.is_dir() or path.is_symlink():
        return _read_or(0, lambda: path.lstat().st_size)
    return sum(_size(Path(folder, name)) for folder, _, files in os.walk(path) for name in files)
