"""What a start does with the files of a run that is there: rolls it back to a checkpoint, moves or removes it.

A rollback moves all later artifacts by renames to `abandoned/branch_b`, where b is the branch that ends. `RESUME.json`,
written last, starts the new branch, so the next rollback completes an interrupted one. An orchestrator that keeps
running while the trainer restarts follows when it reads `RESUME.json`, and archives its own late files
(`archive_late_artifacts`).

Moving an earlier run away renames its entries into `earlier/.tmp-START`, and that folder, once it has them all, to
`earlier/START`, so a folder in `earlier/` is a whole run (I4). The next start puts back what a killed one has moved.
"""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

import psutil

from prime_rl.core.errors import ConfigError
from prime_rl.storage.artifact import MANIFEST, fsync, remove_artifact, replace_file
from prime_rl.storage.checkpoint_artifacts import (
    COMMITTED,
    ORCHESTRATOR,
    CheckpointCommit,
    ResumeRecord,
    read_resume,
    write_resume,
)
from prime_rl.storage.paths import RunPaths, step_of, steps_in

START_VARIABLE = "PRIME_RL_START"
"""Environment variable with the name that `rl` gives to each start of trainer and orchestrator."""
RESTART_VARIABLE = "PRIME_RL_RESTART"
"""Environment variable of a trainer that is restarted after a failure; "1" in a restart."""
_DATA = ("rollouts", "weights", "checkpoints", "ledger", "spool", "metrics", "samples")
_ARTIFACTS = ("step_*", "branch_*", "group_*", "*.jsonl")
"""What a run writes into these folders. Others may have a folder `weights` too."""
_ENTRIES = (
    *_DATA, "evals", "evaluations", "abandoned", "timeline", "heartbeats", "logs/*",
    *(f"configs/{name}.toml" for name in ("trainer", "orchestrator", "run_*", "inference*", "sft", "eval")),
    "tensorboard", "wandb", "mlflow", "format.json", "run.toml",
    "events.jsonl", "kv_cache.json", "loss_surface.json", "bench.json",
)  # fmt: skip
"""What moves with a run. Other files are the user's, or locks."""
_OF_NEW_START = ("logs/rl.*", "logs/page.*", "logs/slurm-*", "logs/relay_*")
"""Written before `rl` starts, by Slurm, the Python API or a relay."""
_TEMPORARY = ".tmp-"


def is_restart() -> bool:
    """Return whether this is a restart after a failure, by torchrun or by `rl`.

    A restart resumes from the newest checkpoint, or else from step 0, independent of the configuration.
    """
    return os.environ.get(RESTART_VARIABLE) == "1" or _read_int("TORCHELASTIC_RESTART_COUNT") > 0


def may_restart() -> bool:
    """Return whether this trainer would be restarted after a failure, or has been restarted."""
    return RESTART_VARIABLE in os.environ or _read_int("TORCHELASTIC_MAX_RESTARTS") > 0 or is_restart()


def start_name() -> str | None:
    """Return an identifier that a start shares with its restarts: from `rl`, or else derived from torchrun's process.

    None if neither would restart this trainer.
    """
    if name := os.environ.get(START_VARIABLE):
        return name
    if not _read_int("TORCHELASTIC_MAX_RESTARTS"):
        return None
    agent = psutil.Process(os.getppid())
    return f"{socket.gethostname()}:{agent.pid}:{agent.create_time()}"


def next_branch(directory: Path, commit: CheckpointCommit | None) -> int:
    """Return the branch of a new resume: above the branches of the checkpoint and of earlier resumes."""
    resume = read_resume(directory)
    return max(commit.branch if commit else 0, resume.branch if resume else 0) + 1


def has_orchestrator(paths: RunPaths, commit: CheckpointCommit | None) -> bool:
    """Return whether an orchestrator will sample the batches again after a rollback to `commit`, or to step 0.

    With a checkpoint, this is the case if it contains the orchestrator's part. Without one, a run under `rl` always has
    an orchestrator, and a standalone trainer that restarts has one if an orchestrator has run, or no batch is recorded.
    """
    if commit is not None:
        return ORCHESTRATOR in commit.parts
    if os.environ.get(START_VARIABLE):
        return True
    return is_restart() and (orchestrator_has_run(paths) or not steps_in(paths.rollouts_dir))


def orchestrator_has_run(paths: RunPaths) -> bool:
    """Return whether there is a ledger, or a heartbeat of an orchestrator, whose ledger may be on another machine."""
    return any(paths.ledger_dir.glob("branch_*.jsonl")) or paths.heartbeat(ORCHESTRATOR).exists()


def roll_back(
    paths: RunPaths, directory: Path, step: int, branch: int, weights: bool, rollouts: bool, start: str | None = None
) -> None:
    """Archive the files of steps >= `step` and write `RESUME.json`.

    Args:
        paths: of the run.
        directory: folder of the checkpoints; later ones are moved, complete or not.
        step: number of completed steps.
        branch: the new branch.
        weights: also archive version `step`, which will be published again. Newer versions are always archived.
        rollouts: also archive batches >= `step`, the ledger, and the orchestrator's metrics and evaluations of these
            steps, because the orchestrator will sample them again.
        start: `start_name`, by which the other processes recognize this resume.
    """
    archive = paths.abandoned(branch - 1)
    _move(_steps(directory, above=step), archive / "checkpoints")
    _move(_steps(paths.weights_dir, above=step - 1 if weights else step), archive / "weights")
    if rollouts:
        _move(_steps(paths.rollouts_dir, above=step - 1), archive / "rollouts")
    _cut_metrics(paths, "trainer", archive, step)
    if rollouts:
        _cut_metrics(paths, "orchestrator", archive, step)
        _move(sorted(paths.ledger_dir.glob("*")), archive / "ledger")
        _move_evaluations(paths, archive, step)
    directory.mkdir(parents=True, exist_ok=True)
    write_resume(directory, ResumeRecord(step, branch, start))


def archive_late_artifacts(paths: RunPaths, directory: Path, step: int, branch: int) -> None:
    """Archive files that an orchestrator of an earlier branch wrote during or after the trainer's rollback.

    Only the orchestrator calls this, before it starts `branch`; the trainer waits for its first batch.

    Files of `branch`, which starts at `step`, are kept, and so are committed checkpoints in `directory`. Unfinished
    ones of earlier steps, of which a stop may have left the orchestrator's part, are never committed either.
    """
    archive = paths.abandoned(branch - 1)
    for batch in _steps(paths.rollouts_dir, above=step - 1):
        if (earlier := branch_of_batch(batch)) is None or earlier < branch:
            _move([batch], paths.abandoned(branch - 1 if earlier is None else earlier) / "rollouts")
    _move(sorted(set(paths.ledger_dir.glob("branch_*.jsonl")) - {paths.ledger(branch)}), archive / "ledger")
    other = [checkpoint for checkpoint in _steps(directory, above=-1) if step_of(checkpoint) != step]
    _move([one for one in other if not (one / COMMITTED).exists()], archive / "checkpoints")
    _move_evaluations(paths, archive, step)
    _cut_metrics(paths, "orchestrator", archive, step)


def _move_evaluations(paths: RunPaths, archive: Path, step: int) -> None:
    """Archive the evaluation rollouts of versions >= `step`."""
    for folder in paths.evals_dir.iterdir() if paths.evals_dir.is_dir() else ():
        files = [file for file in folder.glob("step_*.jsonl") if (step_of(file.with_suffix("")) or 0) >= step]
        _move(sorted(files), archive / "evals" / folder.name)


def branch_of_batch(batch: Path) -> int | None:
    """Return the branch in the manifest of a batch; None if it cannot be read."""
    with suppress(OSError):
        return _int_field((batch / MANIFEST).read_bytes(), "branch")
    return None


def _int_field(text: str | bytes, key: str) -> int | None:
    """Return a number in a JSON object; None if it is missing or the text is malformed."""
    with suppress(ValueError, KeyError, TypeError):
        return int(json.loads(text)[key])
    return None


def _read_int(variable: str) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else 0


def _steps(directory: Path, above: int) -> list[Path]:
    entries = directory.iterdir() if directory.is_dir() else ()
    return sorted(entry for entry in entries if (step := step_of(entry)) is not None and step > above)


def _move(entries: list[Path], target: Path) -> None:
    """Move files or folders of one directory into `target`, under new names if the names are taken."""
    for entry in entries:
        target.mkdir(parents=True, exist_ok=True)
        if entry.is_symlink():  # weights in memory (weight_broadcast.directory) are not archived
            remove_artifact(entry)
            continue
        with suppress(FileNotFoundError):  # trainer and orchestrator may archive the same file
            names = chain([entry.name], (f"{entry.name}.{number}" for number in count(1)))
            unused = next(target / name for name in names if not (target / name).exists())
            shutil.move(entry, unused)  # a rename, unless ckpt.path is on another disk
    if entries:
        fsync(entries[0].parent)


def _cut_metrics(paths: RunPaths, role: str, archive: Path, step: int) -> None:
    """Keep the metrics of steps below `step`; move the others, and an incomplete line, to `archive`."""
    file, target = paths.metrics(role), archive / "metrics" / f"{role}.jsonl"
    if not file.exists():
        return
    kept, cut = list[str](), list[str]()
    for line in file.read_text().splitlines(keepends=True):
        found = _int_field(line, "step") if line.endswith("\n") else None
        (kept if found is not None and found < step else cut).append(line)
    if not cut:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("a") as abandoned:
        abandoned.writelines(cut)
    replace_file(file, "".join(kept))


def has_earlier_run(paths: RunPaths) -> bool:
    """Return whether a run has written artifacts, or `rl` has started one."""
    written = chain.from_iterable(paths.root.glob(f"{folder}/{name}") for folder in _DATA for name in _ARTIFACTS)
    return paths.events.exists() or next(written, None) is not None


def find_earlier_run(paths: RunPaths, checkpoints: Path | None = None) -> list[Path]:
    """Return the files and folders of an earlier run, with its `checkpoints`; [] if there is none.

    Raises:
        ConfigError: there is one in the root of a Git repository, which may have folders of these names itself.
    """
    if not has_earlier_run(paths):
        return []
    if (paths.root / ".git").exists():
        raise ConfigError(
            f"output_dir: {paths.root} is a Git repository with an earlier run, whose folders may be yours; choose "
            "another directory with --exp-id or --output-dir, or remove that run's files yourself"
        )
    found = {path for name in _ENTRIES for path in paths.root.glob(name)}
    if checkpoints is not None and checkpoints.exists() and checkpoints.is_relative_to(paths.root):
        found.add(checkpoints)
    return sorted(found - {path for name in _OF_NEW_START for path in paths.root.glob(name)})


def move_earlier_run(paths: RunPaths, entries: Iterable[Path]) -> Path:
    """Move the entries of a run to `earlier/START`, named after its first event or oldest entry; return the folder.

    Raises:
        ConfigError: an entry cannot be renamed, because it is a link or a mount point; all are where they were.
    """
    entries = list(entries)
    begin = time.localtime(min(entry.lstat().st_mtime for entry in entries))
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError), paths.events.open() as events:
        begin = time.localtime(float(json.loads(events.readline())["time"]))
    started = time.strftime("%Y%m%d_%H%M%S", begin)
    names = chain([started], (f"{started}.{number}" for number in count(1)))
    target = next(path for path in (paths.earlier_dir / name for name in names) if not path.exists())
    temporary = target.with_name(f"{_TEMPORARY}{target.name}")
    advice = "remove the run with --clean, or choose another directory with --exp-id or --output-dir"
    if linked := [entry for entry in entries if entry.is_symlink()]:
        raise ConfigError(
            f"output_dir: {linked[0]} of an earlier run is a symbolic link, so the run cannot be moved to "
            f"{paths.earlier_dir}; {advice}"
        )
    try:
        for entry in entries:
            moved = temporary / entry.relative_to(paths.root)
            moved.parent.mkdir(parents=True, exist_ok=True)
            entry.rename(moved)
        fsync(temporary)
        temporary.rename(target)
    except OSError as error:
        undo_interrupted_move(paths)
        raise ConfigError(
            f"output_dir: {error.filename} of an earlier run cannot be moved to {paths.earlier_dir}: "
            f"{error.strerror}; {advice}"
        ) from None
    fsync(paths.earlier_dir)
    fsync(paths.root)
    return target


def undo_interrupted_move(paths: RunPaths) -> None:
    """Put back what a start that was killed had moved. What is in its place by now stays, and so does the other."""
    for temporary in sorted(paths.earlier_dir.glob(f"{_TEMPORARY}*")):
        if paths.format.exists():  # a start has written its own meanwhile
            (temporary / paths.format.name).unlink(missing_ok=True)
        _put_back(temporary, paths.root)
        if temporary.exists():
            temporary.rename(temporary.with_name(temporary.name.removeprefix(_TEMPORARY)))


def _put_back(entry: Path, place: Path) -> None:
    """Rename a file or folder to its place, or if there is a folder, what is inside and has a place there."""
    if not os.path.lexists(place):
        entry.rename(place)
    elif entry.is_dir() and not entry.is_symlink() and place.is_dir():
        for inner in list(entry.iterdir()):
            _put_back(inner, place / inner.name)
        if not any(entry.iterdir()):
            entry.rmdir()


def remove_earlier_run(entries: Iterable[Path]) -> None:
    """Remove the entries of a run. A folder that is a link, as to another disk, is emptied and stays a link."""
    for entry in entries:
        inside: Iterator[Path] = entry.iterdir() if entry.is_symlink() and entry.is_dir() else iter([entry])
        for path in inside:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def size_bytes(entries: Iterable[Path]) -> int:
    """Return the size of files and of the files in folders."""
    files = chain.from_iterable([entry] if entry.is_file() else entry.rglob("*") for entry in entries)
    return sum(file.lstat().st_size for file in files if not file.is_dir())
