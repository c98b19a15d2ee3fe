"""I4 whole or absent: an artifact is a directory that appears complete, by one rename, or not at all.

Files are written under a temporary name beside the target, fsynced, described by `manifest.json`, and renamed into
place; the parent is fsynced last. The rename commits, the manifest proves.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prime_rl.errors import RunError

MANIFEST = "manifest.json"
WEIGHTS_FORMAT = "prime_rl.weights/1"
"""Format of `weights/step_n`, which the trainer writes and inference loads."""


class ArtifactError(RunError):
    """An artifact that is incomplete or does not say what it should; the message names the file."""


class Incomplete(ArtifactError):
    """Something is missing of it, or shorter than it should be: damaged, or, over a network, not to be seen yet."""


def publish(
    target: Path,
    write: Callable[[Path], Mapping[str, Any]],
    before_rename: Callable[[Path], None] = lambda temporary: None,
) -> dict[str, Any]:
    """Write an artifact and commit it by rename.

    Args:
        target: the directory to appear. It must not exist yet.
        write: writes the files into the temporary directory that it is given and returns the manifest's fields.
        before_rename: called with that directory when all in it is durable; what it writes comes before the artifact.

    Returns:
        The manifest as written: the fields of `write` and `files`, name -> size in bytes.

    Raises:
        ArtifactError: the target exists already.
        OSError: the disk is full, the directory not writable ...; nothing is left behind.
    """
    temporary = begin(target)
    try:
        return commit(temporary, target, write(temporary), before_rename)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def begin(target: Path) -> Path:
    """Make the temporary directory, beside `target`, into which the files of the artifact go before `commit`.

    Raises:
        ArtifactError: the target exists already.
        OSError: the directory is not writable ...
    """
    if target.exists():
        raise ArtifactError(f"{target} exists already; an artifact is never written twice")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".tmp-{target.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    return temporary


def commit(
    temporary: Path,
    target: Path,
    fields: Mapping[str, Any],
    before_rename: Callable[[Path], None] = lambda temporary: None,
) -> dict[str, Any]:
    """Close what `begin` has begun: write the manifest, make all durable, rename. Whoever calls it clears up errors.

    Returns:
        The manifest as written: `fields` and `files`, name -> size in bytes.

    Raises:
        OSError: the disk is full ...
    """
    files = {p.name: p.stat().st_size for p in sorted(temporary.iterdir()) if p.name != MANIFEST}
    manifest = {**fields, "files": files}
    (temporary / MANIFEST).write_text(json.dumps(manifest))
    for path in temporary.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, which another user's server could not read
        fsync(path)
    fsync(temporary)
    before_rename(temporary)
    temporary.rename(target)
    fsync(target.parent)
    return manifest


def remove(path: Path) -> None:
    """Delete an artifact, and what it links to where it is a link; nothing if it is not there.

    Raises:
        OSError: it cannot be deleted.
    """
    if path.is_symlink():
        place = path.resolve()
        path.unlink()  # first: a reader never meets a link to half an artifact
        shutil.rmtree(place, ignore_errors=True)
    elif path.exists():
        shutil.rmtree(path)


def read_manifest(path: Path, expected_format: str) -> dict[str, Any]:
    """Read and check the manifest of the artifact at `path`.

    Raises:
        Incomplete: no manifest, half of one, or a file is missing or has another size.
        ArtifactError: not the expected format.
    """
    file = path / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise Incomplete(f"{file} is missing: {path} is not a published artifact") from None
    except ValueError as error:
        raise Incomplete(f"{file} is not JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != expected_format:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise ArtifactError(f"{file} has format {found!r}, expected {expected_format!r}")
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise ArtifactError(f"{file} lists no files")
    for name, size in files.items():
        try:
            found = (path / name).stat().st_size
        except FileNotFoundError:
            raise Incomplete(f"{path / name} is missing; its manifest says it has {size} bytes") from None
        if found != size:
            raise Incomplete(f"{path / name} has {found} bytes, its manifest says {size}")
    return manifest


def fsync(path: Path) -> None:
    """Make the file or directory `path` survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
