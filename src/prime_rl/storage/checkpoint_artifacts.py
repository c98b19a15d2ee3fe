"""Checkpoints on disk: complete if and only if `COMMITTED` exists, which is written last (I4).

`step_N` contains one artifact per part (`trainer`, `orchestrator`). `COMMITTED` lists the parts and the hash of each
manifest. File sizes are checked when checkpoints are listed, file hashes before a checkpoint is loaded.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.storage.artifact import (
    MANIFEST,
    ArtifactError,
    NewerFormat,
    commit_artifact,
    fsync,
    read_manifest,
    replace_file,
)
from prime_rl.storage.paths import step_of

PART_FORMAT = "prime_rl.checkpoint/1"
COMMITTED = "COMMITTED"
RESUME = "RESUME.json"
"""File in the checkpoint folder with the latest resume (`ResumeRecord`)."""
STOP = "STOP.json"
"""File in the checkpoint folder with the latest request to stop (`StopRecord`)."""
TRAINER, ORCHESTRATOR = "trainer", "orchestrator"
"""The parts of a checkpoint."""
_DELETED = ".deleted-"
Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class CheckpointCommit:
    """The contents of `COMMITTED`.

    Attributes:
        step: number of completed steps.
        branch: branch of the run that wrote it.
        parts: name of each part -> hash of its manifest.
        digest: digest of the settings of the run.
    """

    step: int
    branch: int
    parts: dict[str, str]
    digest: str


@dataclass(frozen=True, slots=True)
class ResumeRecord:
    """The contents of `RESUME.json`: the latest resume.

    Attributes:
        step: step of the checkpoint that was loaded; 0 for a start without one.
        branch: branch that started with it.
        start: name of the start that resumed (`start_name`), if any.
    """

    step: int
    branch: int
    start: str | None = None


@dataclass(frozen=True, slots=True)
class StopRecord:
    """The contents of `STOP.json`: the trainer is asked to stop before its next batch, with a checkpoint.

    Attributes:
        step: the batch before which it stops, which is the step of the checkpoint; None until the ranks agree.
        branch: of the batch; None as well.
        start: name of the start that stops (`start_name`), if any.
    """

    step: int | None = None
    branch: int | None = None
    start: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointListing:
    """The contents of a checkpoint folder.

    Attributes:
        complete: the complete checkpoints, ascending by step.
        broken: name -> reason why it is not complete.
    """

    complete: tuple[CheckpointCommit, ...]
    broken: dict[str, str]

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return [commit.step for commit in self.complete]


def find_checkpoints(directory: Path) -> CheckpointListing:
    """List the checkpoints in `directory`, and check the size of every file.

    Raises ConfigError if one is of a newer release: to leave it out would resume at an earlier step.
    """
    complete, broken = list[CheckpointCommit](), dict[str, str]()
    for entry in sorted(directory.iterdir()) if directory.is_dir() else ():
        if entry.name in (RESUME, STOP) or entry.name.startswith("."):
            continue
        if step_of(entry) is None:
            broken[entry.name] = "is not named step_N"
            continue
        try:
            complete.append(read_commit(entry))
        except NewerFormat as error:
            raise ConfigError(f"ckpt.path: {error}") from None
        except (ArtifactError, OSError) as error:
            broken[entry.name] = str(error)
    return CheckpointListing(tuple(sorted(complete, key=lambda commit: commit.step)), broken)


def read_commit(checkpoint: Path, only: str | None = None) -> CheckpointCommit:
    """Read `COMMITTED` and check the files of every part by size; ArtifactError says why it is not complete.

    `only` limits the check to one part: without a shared directory, each process has its own.
    """
    file = checkpoint / COMMITTED
    commit = _read(file, CheckpointCommit)
    if commit is None:
        raise ArtifactError(f"was not finished: {file} is missing")
    if commit.step != step_of(checkpoint):
        raise ArtifactError(f"{file} belongs to step {commit.step}")
    for part, expected in commit.parts.items():
        if only not in (None, part):
            continue
        read_manifest(checkpoint / part, PART_FORMAT)
        if hash_file(checkpoint / part / MANIFEST) != expected:
            raise ArtifactError(f"{checkpoint / part / MANIFEST} is damaged: its hash differs from {file.name}")
    return commit


def check_hashes(part: Path, rank: int = 0, world_size: int = 1) -> None:
    """Check the hashes of a part's files; each rank checks every `world_size`-th one. ArtifactError names the file."""
    hashes = read_manifest(part, PART_FORMAT)["hashes"]
    for name in sorted(hashes)[rank::world_size]:
        if hash_file(part / name) != hashes[name]:
            raise ArtifactError(f"{part / name} is damaged: its hash differs from the one in its manifest")


def seal_part(temporary: Path, target: Path, fields: Mapping[str, Any], hashes: Mapping[str, str]) -> None:
    """Commit the part `target` = `step_N/<part>` with the `hash_file` of each file; see `commit_artifact`."""
    commit_artifact(temporary, target, {"format": PART_FORMAT, **fields, "hashes": dict(hashes)})


def commit_checkpoint(checkpoint: Path, branch: int, parts: Iterable[str], digest: str) -> CheckpointCommit:
    """Check every part and write `COMMITTED`. Raises ArtifactError if a part is missing or incomplete."""
    for part in parts:
        read_manifest(checkpoint / part, PART_FORMAT)
    hashes = {part: hash_file(checkpoint / part / MANIFEST) for part in parts}
    step = step_of(checkpoint)
    assert step is not None, checkpoint
    commit = CheckpointCommit(step, branch, hashes, digest)
    write_json(checkpoint / COMMITTED, asdict(commit))
    fsync(checkpoint.parent)
    return commit


def temporary_part(checkpoint: Path, part: str) -> Path:
    """Return the folder in which `part` is written, the same on all ranks."""
    return checkpoint / f".tmp-{part}"


def prepare_part(checkpoint: Path, part: str) -> Path:
    """Remove an uncommitted attempt to write `part`, and return an empty temporary folder to write to.

    Raises ArtifactError if the checkpoint is already committed.
    """
    if (checkpoint / COMMITTED).exists():
        raise ArtifactError(f"{checkpoint} is complete already; checkpoints are never overwritten")
    temporary = temporary_part(checkpoint, part)
    for leftover in (temporary, checkpoint / part):
        if leftover.exists():
            shutil.rmtree(leftover)
    temporary.mkdir(parents=True)
    return temporary


def remove_old_checkpoints(directory: Path, keep_last: int | None, keep_interval: int | None) -> list[int]:
    """Delete old complete checkpoints, each hidden by a rename first; return the remaining steps, ascending.

    Keeps the `keep_last` newest ones (None keeps all) and the multiples of `keep_interval`.
    """
    for leftover in directory.glob(f"{_DELETED}*"):
        shutil.rmtree(leftover)
    steps = find_checkpoints(directory).steps
    old = steps[:-keep_last] if keep_last is not None else []
    dropped = {step for step in old if keep_interval is None or step % keep_interval}
    for step in sorted(dropped):
        hidden = directory / f"{_DELETED}step_{step}"
        (directory / f"step_{step}").rename(hidden)
        shutil.rmtree(hidden)
    return [step for step in steps if step not in dropped]


def remove_unfinished(directory: Path, below: int) -> None:
    """Delete the checkpoints before step `below` that were not committed and will not be."""
    for entry in directory.iterdir():
        step = step_of(entry)
        if step is not None and step < below and not (entry / COMMITTED).exists():
            shutil.rmtree(entry)


def hash_file(file: Path) -> str:
    """Return the xxh3_128 of a file, in hexadecimal."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, xxhash.xxh3_128).hexdigest()


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Return the xxh3_128 of JSON-serializable settings, in hexadecimal and independent of their order."""
    return xxhash.xxh3_128(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def read_resume(directory: Path) -> ResumeRecord | None:
    """Read `RESUME.json`; None if it does not exist. Raises ArtifactError if it is damaged."""
    return _read(directory / RESUME, ResumeRecord)


def write_resume(directory: Path, resume: ResumeRecord) -> None:
    """Write `RESUME.json`, which starts a branch."""
    write_json(directory / RESUME, asdict(resume))


def read_stop(directory: Path) -> StopRecord | None:
    """Read `STOP.json`; None if it does not exist. Raises ArtifactError if it is damaged."""
    return _read(directory / STOP, StopRecord)


def write_stop(directory: Path, stop: StopRecord) -> None:
    """Write `STOP.json`, which asks for a checkpoint before the run stops."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / STOP, asdict(stop))


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write a small JSON file atomically and durably."""
    replace_file(file, json.dumps(value))


def _read(file: Path, kind: type[Record]) -> Record | None:
    if not file.exists():
        return None
    with translate_error(ValueError, lambda error: ArtifactError(f"{file} is damaged: {error}")):
        return msgspec.json.decode(file.read_bytes(), type=kind)
