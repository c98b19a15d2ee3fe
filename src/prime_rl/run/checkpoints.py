"""I4: a checkpoint counts only where `COMMITTED` is, which is written last and proves what stands beside it.

`step_N` holds one folder a part (`trainer`, `orchestrator`), each an artifact: written under a temporary name, with a
manifest of its files' sizes and hashes, fsynced, renamed. `COMMITTED` names the parts and the hash of each manifest.
Sizes are checked whenever checkpoints are listed; the hashes, which cost a pass over the files, before one is used.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from prime_rl.run.artifact import MANIFEST, ArtifactError, fsync, read_manifest
from prime_rl.run.paths import step_of

PART_FORMAT = "prime_rl.checkpoint/1"
COMMITTED = "COMMITTED"
RESUME = "RESUME.json"
"""In the folder of the checkpoints: the latest resume (`Resume`)."""
TRAINER, ORCHESTRATOR = "trainer", "orchestrator"
"""The parts of a checkpoint."""
_DELETED = ".deleted-"
_CHUNK = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class Commit:
    """What `COMMITTED` says.

    Attributes:
        step: N, the steps that are done.
        branch: of the run that wrote it.
        parts: name of each part -> hash of its manifest.
        digest: of the settings that the run was trained with.
    """

    step: int
    branch: int
    parts: dict[str, str]
    digest: str


@dataclass(frozen=True, slots=True)
class Resume:
    """What `RESUME.json` says of the latest resume.

    Attributes:
        step: N, the checkpoint that was gone back to; 0 is the beginning.
        branch: that began with it.
        start: of the run that resumed, where `rl` has given it a name.
    """

    step: int
    branch: int
    start: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What a folder of checkpoints holds.

    Attributes:
        complete: the commits, by step, ascending.
        broken: name -> why it does not count.
    """

    complete: tuple[Commit, ...]
    broken: dict[str, str]

    @property
    def steps(self) -> list[int]:
        """Steps of the complete ones, ascending."""
        return [commit.step for commit in self.complete]


def find_checkpoints(directory: Path) -> Found:
    """List `directory`, checking the size of every file. What disappears meanwhile is not listed."""
    complete, broken = list[Commit](), dict[str, str]()
    for entry in sorted(directory.iterdir()) if directory.is_dir() else ():
        if entry.name == RESUME or entry.name.startswith("."):
            continue
        if step_of(entry) is None:
            broken[entry.name] = "is not a name of a checkpoint"
            continue
        try:
            complete.append(read_commit(entry))
        except (ArtifactError, OSError) as error:
            broken[entry.name] = str(error)
    return Found(tuple(sorted(complete, key=lambda commit: commit.step)), broken)


def read_commit(checkpoint: Path) -> Commit:
    """Read `COMMITTED` and check that every part has its files, by size.

    Raises:
        ArtifactError: the checkpoint does not count; says why.
    """
    file = checkpoint / COMMITTED
    try:
        commit = Commit(**json.loads(file.read_text()))
    except FileNotFoundError:
        raise ArtifactError(f"was not finished: {file} is missing") from None
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{file} is damaged: {error}") from None
    if commit.step != step_of(checkpoint):
        raise ArtifactError(f"{file} is of step {commit.step}")
    for part, expected in commit.parts.items():
        read_manifest(checkpoint / part, PART_FORMAT)
        if hash_file(checkpoint / part / MANIFEST) != expected:
            raise ArtifactError(f"{checkpoint / part / MANIFEST} is damaged: its hash is not the one in {file.name}")
    return commit


def check_hashes(part: Path, turn: int = 0, of: int = 1) -> None:
    """Check the contents of every `of`-th file of a part, beginning with the `turn`-th, so that ranks can share them.

    Raises:
        ArtifactError: a file is not what was written; names it.
    """
    hashes = read_manifest(part, PART_FORMAT)["hashes"]
    for name in sorted(hashes)[turn::of]:
        if hash_file(part / name) != hashes[name]:
            raise ArtifactError(f"{part / name} is damaged: its hash is not the one in its manifest")


def seal_part(temporary: Path, target: Path, fields: Mapping[str, Any], hashes: Mapping[str, str]) -> None:
    """Make the files in `temporary` the part `target`, by rename. The files must be on the disk already.

    Args:
        temporary: beside `target`.
        target: `step_N/<part>`; it must not exist.
        fields: what else the manifest shall say.
        hashes: file name -> `hash_file`.

    Raises:
        OSError: the disk is full ...
    """
    files = {name: (temporary / name).stat().st_size for name in hashes}
    manifest = {"format": PART_FORMAT, **fields, "files": files, "hashes": dict(hashes)}
    (temporary / MANIFEST).write_text(json.dumps(manifest))
    fsync(temporary / MANIFEST)
    fsync(temporary)
    temporary.rename(target)
    fsync(target.parent)


def commit_checkpoint(checkpoint: Path, branch: int, parts: Iterable[str], digest: str) -> Commit:
    """Write `COMMITTED`, after checking that every part is there.

    Raises:
        ArtifactError: a part is missing or incomplete.
        OSError: the disk is full ...
    """
    for part in parts:
        read_manifest(checkpoint / part, PART_FORMAT)
    hashes = {part: hash_file(checkpoint / part / MANIFEST) for part in parts}
    step = step_of(checkpoint)
    assert step is not None, checkpoint
    commit = Commit(step, branch, hashes, digest)
    write_json(checkpoint / COMMITTED, asdict(commit))
    fsync(checkpoint.parent)
    return commit


def clear_unfinished(checkpoint: Path, part: str) -> Path:
    """Make room for writing `part` anew where an attempt did not come to its commit.

    Returns:
        The temporary folder to write to, which exists and is empty.

    Raises:
        ArtifactError: the checkpoint is committed.
        OSError: the directory cannot be written.
    """
    if (checkpoint / COMMITTED).exists():
        raise ArtifactError(f"{checkpoint} is complete already; a checkpoint is never written twice")
    temporary = checkpoint / f".tmp-{part}"
    for leftover in (temporary, checkpoint / part):
        if leftover.exists():
            shutil.rmtree(leftover)
    temporary.mkdir(parents=True)
    return temporary


def prune(directory: Path, keep_last: int | None, keep_interval: int | None) -> list[int]:
    """Delete complete checkpoints that need not be kept, each made invisible by a rename first.

    Args:
        directory: of the checkpoints.
        keep_last: how many of the newest stay; None keeps all.
        keep_interval: multiples of it stay too.

    Returns:
        The steps that are left, ascending.
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


def hash_file(file: Path) -> str:
    """Hex xxh3_128 of a file's bytes."""
    digest = xxhash.xxh3_128()
    if file.stat().st_size:
        data = np.memmap(file, np.uint8, mode="r")
        for begin in range(0, len(data), _CHUNK):
            digest.update(data[begin : begin + _CHUNK].data)
    return digest.hexdigest()


def digest_of(settings: Mapping[str, Any]) -> str:
    """Hex xxh3_128 of values that JSON can write, independent of their order."""
    return xxhash.xxh3_128(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def read_resume(directory: Path) -> Resume | None:
    """Read `RESUME.json`; None where nothing was ever resumed.

    Raises:
        ArtifactError: the file is damaged.
    """
    file = directory / RESUME
    try:
        return Resume(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{file} is damaged: {error}") from None


def write_resume(directory: Path, resume: Resume) -> None:
    """Write `RESUME.json`, which begins a branch."""
    write_json(directory / RESUME, asdict(resume))


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write a small file whole or not at all."""
    temporary = file.with_name(f".tmp-{file.name}-{os.getpid()}")
    temporary.write_text(json.dumps(value))
    fsync(temporary)
    temporary.rename(file)
    fsync(file.parent)
