"""I5: a version that was published as a delta, and how it is rebuilt: from a full version and every delta since.

    weights/step_4  full      weights/step_5  delta, base step_4      weights/step_6  delta, base step_5

The manifest of a delta is that of any version (version, hash of each tensor, canary), and names its base besides, which
lies beside it. Every file of the full version has a delta of the same stem, so that one file at a time is rebuilt. What
comes out has the hashes of the version's manifest, tensor by tensor, or it is one error.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prime_rl.run.artifact import MANIFEST, WEIGHTS_FORMAT, ArtifactError, read_manifest
from prime_rl.run.delta.codec import patch
from prime_rl.run.delta.container import Delta, DeltaError, Entry
from prime_rl.run.paths import step_of
from prime_rl.run.tensors import content_hash, hash_tensors, parse_tensors
from prime_rl.types import PolicyVersion

SUFFIX = ".delta"
_WEIGHTS = ".safetensors"


@dataclass(frozen=True, slots=True)
class Base:
    """What a delta starts from.

    Attributes:
        name: of its directory, beside that of the delta.
        version: which one it is.
        hash: content hash of its tensors.
    """

    name: str
    version: PolicyVersion
    hash: str


def base_of(directory: Path, manifest: Mapping[str, Any]) -> Base | None:
    """Return what the published version in `directory` is a delta of; None where it is full.

    Raises:
        ArtifactError: its manifest is malformed.
    """
    link = manifest.get("delta")
    if link is None or (isinstance(link, Mapping) and link.get("base") is None):
        return None
    try:
        base = Base(str(link["base"]), PolicyVersion(int(link["branch"]), int(link["step"])), str(link["hash"]))
        if Path(base.name).name != base.name or step_of(Path(base.name)) is None:
            raise ValueError(f"base {base.name!r} is no step_N")
        if base.version >= PolicyVersion(int(manifest["branch"]), int(manifest["step"])):
            raise ValueError(f"base {base.version} is not older")
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{directory / MANIFEST} is malformed: delta: {type(error).__name__}: {error}") from None
    return base


def among_deltas(manifest: Mapping[str, Any]) -> bool:
    """Tell whether the version is a delta, or a full one that deltas may start from."""
    return manifest.get("delta") is not None


def chain_of(directory: Path) -> list[Path]:
    """Return what the version in `directory` is rebuilt from: itself, its base, the base of that ... a full one.

    Raises:
        ArtifactError: one of them is not there, incomplete, or another version than was meant.
    """
    chain = [directory]
    manifest = read_manifest(directory, WEIGHTS_FORMAT)
    while (base := base_of(chain[-1], manifest)) is not None:
        manifest = read_base(chain[-1], base)
        chain.append(chain[-1].parent / base.name)
    return chain


def read_base(directory: Path, base: Base) -> dict[str, Any]:
    """Read the manifest of the base of the delta in `directory`.

    Raises:
        ArtifactError: it is not there, incomplete, or another version than was meant.
    """
    place = directory.parent / base.name
    try:
        manifest = read_manifest(place, WEIGHTS_FORMAT)
    except ArtifactError as error:
        raise ArtifactError(f"{directory} is a delta of version {base.version}, which is not there: {error}") from None
    found = (manifest.get("branch"), manifest.get("step"), manifest.get("hash"))
    if found != (base.version.branch, base.version.step, base.hash):
        raise ArtifactError(
            f"{directory} is a delta of version {base.version} with content hash {base.hash}; {place} is version "
            f"{found[0]}.{found[1]} with {found[2]}"
        )
    return manifest


def read_entries(directory: Path, manifest: Mapping[str, Any]) -> dict[str, tuple[Path, Entry]]:
    """Check all files of a delta, and that they are what its manifest says.

    Returns:
        By name of the tensor, the file and what it says of the tensor.

    Raises:
        DeltaError: a file is damaged, or not what was published.
        ArtifactError: the manifest is malformed, or lists no such file.
    """
    entries: dict[str, tuple[Path, Entry]] = {}
    for name in _delta_files(directory, manifest):
        delta = open_delta(directory, manifest, name)
        entries |= {tensor: (delta.path, entry) for tensor, entry in delta.entries.items()}
    base = base_of(directory, manifest)
    if base is None or content_hash({name: entry.base for name, (_, entry) in entries.items()}) != base.hash:
        raise DeltaError(f"{directory / MANIFEST} is not what was published: its base has another content hash")
    return entries


def open_delta(directory: Path, manifest: Mapping[str, Any], name: str) -> Delta:
    """Open one file of a delta, and check that it is what the manifest says; raises as `read_entries`."""
    delta, base = Delta.open(directory / name), base_of(directory, manifest)
    version = PolicyVersion(manifest["branch"], manifest["step"])
    if base is None or (delta.base_version, delta.version) != (base.version, version):
        raise DeltaError(
            f"{delta.path} leads from version {delta.base_version} to {delta.version}; its manifest says from "
            f"{base and base.version} to {version}"
        )
    published = manifest.get("tensors")
    if not isinstance(published, Mapping):
        raise ArtifactError(f"{directory / MANIFEST} lists no tensors")
    for tensor, entry in delta.entries.items():
        if published.get(tensor) != entry.result:
            raise DeltaError(f"{delta.path} is not what was published: tensor {tensor} has another hash")
    return delta


def rebuild(
    full: Path,
    deltas: Sequence[Path],
    target: Path,
    *,
    threads: int = 1,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write to `target` the full version that `deltas` make of `full`. One file at a time is in memory.

    Nothing is made durable, and what an error has left behind is the caller's to remove.

    Args:
        full: a full version. It is compared with its manifest.
        deltas: directories, each a delta of the one before, the first of `full`; [] copies.
        target: an empty directory. It gets weights, manifest, and whatever else is in `full`.
        threads: that work at the same time.
        check: called now and then; what it raises ends the work.

    Raises:
        DeltaError: a delta is damaged, or does not fit what it shall be applied to.
        ArtifactError: something else is missing, damaged, or not what was published.
        OSError: the disk is full ...
    """
    steps = [(directory, read_manifest(directory, WEIGHTS_FORMAT)) for directory in (full, *deltas)]
    for other in full.iterdir():
        if other.is_file() and other.suffix != _WEIGHTS and other.name != MANIFEST:
            shutil.copyfile(other, target / other.name)
    files = sorted(full.glob(f"*{_WEIGHTS}"))
    for directory, manifest in steps[1:]:
        if _delta_files(directory, manifest) != [file.stem + SUFFIX for file in files]:
            raise ArtifactError(f"{directory} has not one {SUFFIX} file for each {_WEIGHTS} file of {full}")
    for file in files:
        check()
        data = np.fromfile(file, np.uint8)
        tensors = dict(parse_tensors(file, data))
        for name, tensor in tensors.items():
            if tensor.digest(name) != steps[0][1]["tensors"].get(name):
                raise ArtifactError(f"{file} is not what was published: tensor {name} has another hash")
        for directory, manifest in steps[1:]:
            check()
            patch(tensors, open_delta(directory, manifest, file.stem + SUFFIX), threads=threads)
        with (target / file.name).open("wb") as output:
            output.write(data.data)
    fields = {key: value for key, value in steps[-1][1].items() if key != "delta"}
    sizes = {entry.name: entry.stat().st_size for entry in sorted(target.iterdir())}
    (target / MANIFEST).write_text(json.dumps({**fields, "files": sizes}))


def is_sound(directory: Path) -> bool:
    """Tell whether a full version is there, and every tensor has the hash of its manifest."""
    try:
        return bool(read_manifest(directory, WEIGHTS_FORMAT)["tensors"] == hash_tensors(directory))
    except (ArtifactError, OSError, KeyError):
        return False


def _delta_files(directory: Path, manifest: Mapping[str, Any]) -> list[str]:
    names = sorted(name for name in manifest["files"] if name.endswith(SUFFIX))
    if not names:
        raise ArtifactError(f"{directory / MANIFEST} lists no {SUFFIX} file")
    return names
