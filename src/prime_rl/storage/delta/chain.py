"""Rebuilds a version that was published as a delta, from a full version and all deltas since.

    weights/step_4  full      weights/step_5  delta, base step_4      weights/step_6  delta, base step_5

The manifest of a delta is that of any version (version, hash of each tensor, canary), plus the name of its base. Each
file of the full version has a delta file of the same stem, so that files are rebuilt one at a time. The result has the
tensor hashes of the version's manifest, or rebuilding raises an error (I5).
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prime_rl.core.errors import summarize_exception
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.artifact import MANIFEST, WEIGHTS_FORMAT, ArtifactError, read_manifest
from prime_rl.storage.delta.container import Delta, DeltaError, TensorDelta
from prime_rl.storage.delta.tensor_codec import patch_tensors
from prime_rl.storage.paths import step_of
from prime_rl.storage.tensor_hashes import content_hash, hash_tensors, parse_tensors

SUFFIX = ".delta"
_WEIGHTS = ".safetensors"


@dataclass(frozen=True, slots=True)
class DeltaBase:
    """The base of a delta.

    Attributes:
        name: name of its directory, next to that of the delta.
        version: version of the base.
        hash: content hash of its tensors.
    """

    name: str
    version: PolicyVersion
    hash: str


def base_of(directory: Path, manifest: Mapping[str, Any]) -> DeltaBase | None:
    """Return the base of the version in `directory`, None if it is full. Raises ArtifactError if malformed."""
    link = manifest.get("delta")
    if link is None or (isinstance(link, Mapping) and link.get("base") is None):
        return None
    try:
        base = DeltaBase(str(link["base"]), PolicyVersion(int(link["branch"]), int(link["step"])), str(link["hash"]))
        if Path(base.name).name != base.name or step_of(Path(base.name)) is None:
            raise ValueError(f"base {base.name!r} is not named step_N")
        if base.version >= PolicyVersion(int(manifest["branch"]), int(manifest["step"])):
            raise ValueError(f"base {base.version} is not older")
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{directory / MANIFEST} is malformed: delta: {summarize_exception(error)}") from None
    return base


def chain_of(directory: Path) -> list[Path]:
    """Return the directories that a version is rebuilt from: itself, its base, and so on to a full version.

    Raises ArtifactError if one of them is missing, incomplete, or another version.
    """
    chain = [directory]
    manifest = read_manifest(directory, WEIGHTS_FORMAT)
    while (base := base_of(chain[-1], manifest)) is not None:
        manifest = read_base(chain[-1], base)
        chain.append(chain[-1].parent / base.name)
    return chain


def read_base(directory: Path, base: DeltaBase) -> dict[str, Any]:
    """Read the manifest of the base of the delta in `directory`; raises as `chain_of`."""
    place = directory.parent / base.name
    try:
        manifest = read_manifest(place, WEIGHTS_FORMAT)
    except ArtifactError as error:
        raise ArtifactError(f"{directory} is a delta of version {base.version}, which is missing: {error}") from None
    found = (manifest.get("branch"), manifest.get("step"), manifest.get("hash"))
    if found != (base.version.branch, base.version.step, base.hash):
        raise ArtifactError(
            f"{directory} is a delta of version {base.version} with content hash {base.hash}; {place} is version "
            f"{found[0]}.{found[1]} with {found[2]}"
        )
    return manifest


def read_entries(directory: Path, manifest: Mapping[str, Any]) -> dict[str, tuple[Path, TensorDelta]]:
    """Check all files of a delta against its manifest; return file and entry of each tensor by name.

    Raises:
        DeltaError: a file is damaged, or differs from the published one.
        ArtifactError: the manifest is malformed, or lists no delta file.
    """
    entries: dict[str, tuple[Path, TensorDelta]] = {}
    for name in _delta_files(directory, manifest):
        delta = open_delta(directory, manifest, name)
        entries |= {tensor: (delta.path, entry) for tensor, entry in delta.entries.items()}
    base = base_of(directory, manifest)
    if base is None or content_hash({name: entry.base for name, (_, entry) in entries.items()}) != base.hash:
        raise DeltaError(f"{directory / MANIFEST} is not what was published: its base has another content hash")
    return entries


def open_delta(directory: Path, manifest: Mapping[str, Any], name: str) -> Delta:
    """Open one file of a delta and check it against the manifest; raises as `read_entries`."""
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
    full: Path, deltas: Sequence[Path], target: Path, threads: int = 1, check: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Apply `deltas` to `full`, write the resulting full version to `target`, and return its manifest.

    One file at a time is in memory. The files are not fsynced. After an error, the caller removes `target`.

    Args:
        full: a full version; it is compared with its manifest.
        deltas: directories, each a delta of the previous one, the first of `full`; [] copies.
        target: an empty directory, which receives weights, manifest and all other files of `full`.
        threads: number of worker threads.
        check: called regularly; raises to abort.

    Raises:
        DeltaError: a delta is damaged or does not match its base.
        ArtifactError: another file is missing, damaged, or differs from the published one.
    """
    steps = [(directory, read_manifest(directory, WEIGHTS_FORMAT)) for directory in (full, *deltas)]
    for other in full.iterdir():
        if other.is_file() and other.suffix != _WEIGHTS and other.name != MANIFEST:
            shutil.copyfile(other, target / other.name)
    files = sorted(full.glob(f"*{_WEIGHTS}"))
    for directory, manifest in steps[1:]:
        if _delta_files(directory, manifest) != [file.stem + SUFFIX for file in files]:
            raise ArtifactError(f"{directory} does not have one {SUFFIX} file per {_WEIGHTS} file of {full}")
    for file in files:
        check()
        data = np.fromfile(file, np.uint8)
        tensors = dict(parse_tensors(file, data))
        for name, tensor in tensors.items():
            if tensor.digest(name) != steps[0][1]["tensors"].get(name):
                raise ArtifactError(f"{file} is not what was published: tensor {name} has another hash")
        for directory, manifest in steps[1:]:
            check()
            patch_tensors(tensors, open_delta(directory, manifest, file.stem + SUFFIX), threads=threads)
        (target / file.name).write_bytes(data.data)
    sizes = {entry.name: entry.stat().st_size for entry in sorted(target.iterdir())}
    fields = {key: value for key, value in steps[-1][1].items() if key != "delta"} | {"files": sizes}
    (target / MANIFEST).write_text(json.dumps(fields))
    return fields


def is_intact(directory: Path) -> bool:
    """Return whether a full version exists and every tensor has the hash in its manifest."""
    try:
        return bool(read_manifest(directory, WEIGHTS_FORMAT)["tensors"] == hash_tensors(directory))
    except (ArtifactError, OSError, KeyError):
        return False


def _delta_files(directory: Path, manifest: Mapping[str, Any]) -> list[str]:
    names = sorted(name for name in manifest["files"] if name.endswith(SUFFIX))
    if not names:
        raise ArtifactError(f"{directory / MANIFEST} lists no {SUFFIX} file")
    return names
