"""What there is to know of a run, read from its directory and from this node's kernel. Reads only, and judges nothing.

A directory may be half written, of an older version, or damaged: what cannot be read is left out, or is None.
"""

import json
import os
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from prime_rl.run.artifact import ArtifactError
from prime_rl.run.checkpoints import Commit, Found, Resume, find_checkpoints, read_resume
from prime_rl.run.heartbeat import Life, Verdict
from prime_rl.run.paths import RunPaths, steps_in

ROLES = ("trainer", "orchestrator", "inference")
_TAIL_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class Halted:
    """A process of the run that the kernel does not run.

    Attributes:
        pid: its process id.
        name: what it is called: its heartbeat's name, its role's, or `role/pid`.
        command: what it is, for people.
        traced: a debugger holds it; otherwise it got SIGSTOP.
    """

    pid: int
    name: str
    command: str
    traced: bool


@dataclass(frozen=True, slots=True)
class Disk:
    """Room, bytes.

    Attributes:
        free: for this user.
        total: of the file system.
        used: by the run, folder by folder, the largest first.
        version: of the newest published version.
        checkpoint: of the newest complete checkpoint.
    """

    free: int
    total: int
    used: dict[str, int]
    version: int = 0
    checkpoint: int = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """What `run.toml` says; None where there is none, as of a run that `rl` has not started.

    Attributes:
        max_steps: of the run.
        async_level: k.
        ckpt: folder of the checkpoints; None without checkpoints.
    """

    max_steps: int | None = None
    async_level: int | None = None
    ckpt: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """A run, at one moment.

    Attributes:
        root: its directory.
        now: Unix seconds, to say how long ago something was; nothing is judged by it.
        watched_s: for how long the heartbeats were watched.
        verdicts: of the processes that have a heartbeat, by name.
        halted: processes of this node that are stopped.
        owner: process id of the `rl` that holds the directory, if one on this node does.
        events: of `events.jsonl`, in order.
        trained: the trainer's last metrics.
        shipped: the orchestrator's.
        version: newest published version.
        batch: newest shipped batch that is still there.
        checkpoints: complete ones, ascending.
        broken: other entries of their folder, and what is wrong with each.
        resume: the latest.
        errors: role -> what it said when it failed.
        disk: room.
        settings: of the run.
    """

    root: Path
    now: float = 0.0
    watched_s: float = 0.0
    verdicts: tuple[Verdict, ...] = ()
    halted: tuple[Halted, ...] = ()
    owner: int | None = None
    events: tuple[Mapping[str, Any], ...] = ()
    trained: Mapping[str, Any] | None = None
    shipped: Mapping[str, Any] | None = None
    version: int | None = None
    batch: int | None = None
    checkpoints: tuple[Commit, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    resume: Resume | None = None
    errors: Mapping[str, str] = field(default_factory=dict)
    disk: Disk | None = None
    settings: Settings = field(default_factory=Settings)


def is_run(paths: RunPaths) -> bool:
    """Whether a run has left anything in the directory."""
    files = paths.run_toml, paths.events
    folders = paths.heartbeats_dir, paths.metrics_dir, paths.ledger_dir
    steps = paths.weights_dir, paths.rollouts_dir, paths.checkpoints_dir
    return (
        any(file.is_file() for file in files)
        or any(folder.is_dir() and any(folder.iterdir()) for folder in folders)
        or any(steps_in(folder) for folder in steps)
    )


def read_facts(paths: RunPaths, verdicts: tuple[Verdict, ...], now: float, watched_s: float) -> Facts:
    """Read a run's directory, and ask the kernel for the processes of this node.

    Args:
        paths: of the run.
        verdicts: what watching the heartbeats has given.
        now: Unix seconds.
        watched_s: how long that took.
    """
    settings = read_settings(paths)
    events = tuple(_json_lines(paths.events))
    versions, batches = steps_in(paths.weights_dir), steps_in(paths.rollouts_dir)
    checkpoints_dir = paths.root / settings.ckpt if settings.ckpt else paths.checkpoints_dir
    found = _found(checkpoints_dir)
    return Facts(
        root=paths.root,
        now=now,
        watched_s=watched_s,
        verdicts=verdicts,
        halted=tuple(_halted(verdicts, events)),
        owner=lock_owner(paths),
        events=events,
        trained=_last(paths.metrics("trainer")),
        shipped=_last(paths.metrics("orchestrator")),
        version=versions[-1] if versions else None,
        batch=batches[-1] if batches else None,
        checkpoints=found.complete,
        broken=found.broken,
        resume=_resume(checkpoints_dir),
        errors={role: text for role in ROLES if (text := _error(paths.error(role))) is not None},
        disk=_disk(paths, versions[-1:], [checkpoints_dir / f"step_{step}" for step in found.steps[-1:]]),
        settings=settings,
    )


def read_settings(paths: RunPaths) -> Settings:
    """Read what matters here of the resolved configuration."""
    told = read_toml(paths.run_toml)
    steps, level, ckpt = told.get("max_steps"), told.get("async_level"), told.get("ckpt")
    return Settings(
        steps if isinstance(steps, int) else None,
        level if isinstance(level, int) else None,
        str(ckpt.get("path", "checkpoints")) if isinstance(ckpt, dict) else None,
    )


def read_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file; {} where there is none that can be read."""
    try:
        return tomllib.loads(file.read_text())
    except (OSError, ValueError):
        return {}


def lock_owner(paths: RunPaths) -> int | None:
    """Who holds the directory's lock, by the kernel's list: asking for the lock itself might keep `rl` from it."""
    try:
        inode = paths.lock.stat().st_ino
        device = paths.lock.stat().st_dev
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    place = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}"
    for words in map(str.split, lines):
        if len(words) > 5 and words[1] == "FLOCK" and words[5] == place:
            with suppress(ValueError):
                return int(words[4])
    return None


def _halted(verdicts: tuple[Verdict, ...], events: tuple[Mapping[str, Any], ...]) -> Iterator[Halted]:
    """Find the stopped among those who have a heartbeat here, their descendants, and what `rl` has started."""
    here = {v.beat.pid: v.name for v in verdicts if v.beat and v.life not in (Life.GONE, Life.UNKNOWN)}
    processes: dict[int, psutil.Process] = {}
    for pid in here:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            processes |= {p.pid: p for p in (process, *process.children(recursive=True))}
    started = {event.get("pid"): str(event.get("name")) for event in events if event.get("event") == "started"}
    for pid, process in sorted(processes.items()):
        with suppress(psutil.Error):
            status = process.status()
            if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                name = here.get(pid) or started.get(pid) or f"{_nearest(process, here)}/{pid}"
                yield Halted(pid, name, _command(process), status == psutil.STATUS_TRACING_STOP)


def _nearest(process: psutil.Process, here: Mapping[int, str]) -> str:
    return next((here[parent.pid] for parent in process.parents() if parent.pid in here), "?")


def _command(process: psutil.Process) -> str:
    words = [Path(word).name if word.startswith("/") else word for word in process.cmdline()]
    return " ".join(words)[:80] or process.name()


def _json_lines(file: Path) -> Iterator[Mapping[str, Any]]:
    """The objects of the last lines of a file; a line that is still being written is left out."""
    try:
        with file.open("rb") as content:
            content.seek(0, os.SEEK_END)
            begin = max(0, content.tell() - _TAIL_BYTES)
            content.seek(begin)
            lines = content.read().splitlines(keepends=True)
    except OSError:
        return
    for line in lines[1 if begin else 0 :]:
        with suppress(ValueError):
            if line.endswith(b"\n") and isinstance(told := json.loads(line), dict):
                yield told


def _last(file: Path) -> Mapping[str, Any] | None:
    lines = [line for line in _json_lines(file) if isinstance(line.get("step"), int)]
    return lines[-1] if lines else None


def _found(directory: Path) -> Found:
    try:
        return find_checkpoints(directory)
    except OSError as error:
        return Found((), {directory.name: f"cannot be read: {error.strerror}"})


def _resume(directory: Path) -> Resume | None:
    try:
        return read_resume(directory)
    except (ArtifactError, OSError):  # only a resume needs it, and says so
        return None


def _error(file: Path) -> str | None:
    try:
        return str(json.loads(file.read_text())["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _disk(paths: RunPaths, versions: list[int], checkpoints: list[Path]) -> Disk | None:
    try:
        room = shutil.disk_usage(paths.root)
    except OSError:
        return None
    used = {entry.name: _size(entry) for entry in paths.root.iterdir()}
    return Disk(
        room.free,
        room.total,
        {name: size for name, size in sorted(used.items(), key=lambda item: -item[1]) if size},
        sum(_size(paths.weights(step).resolve()) for step in versions),
        sum(_size(path) for path in checkpoints),
    )


def _size(path: Path) -> int:
    """Bytes of a file, or of all in a folder; what is removed meanwhile is not counted, nor what a link leads to."""
    if not path.is_dir() or path.is_symlink():
        try:
            return path.lstat().st_size
        except OSError:
            return 0
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                total += Path(folder, name).lstat().st_size
    return total
