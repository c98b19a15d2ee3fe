"""Artifacts: directories that appear atomically and complete, or not at all (I4).

Files are written to a temporary directory next to the target, described by `manifest.json`, fsynced, and committed by
renaming the directory. Readers check the files against the manifest.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prime_rl.core.errors import RunError

MANIFEST = "manifest.json"
WEIGHTS_FORMAT = "prime_rl.weights/1"
"""Format of `weights/step_n`, which the trainer writes and inference loads."""


class ArtifactError(RunError):
    """An artifact is incomplete or invalid; the message names the file."""


class IncompleteArtifact(ArtifactError):
    """A part is missing or too short: the artifact is damaged, or a network file system does not show all of it yet."""


def publish_artifact(
    target: Path,
    write: Callable[[Path], Mapping[str, Any]],
    before_rename: Callable[[Path], None] = lambda temporary: None,
) -> dict[str, Any]:
    """Write an artifact and commit it by rename. After an error, the temporary directory is removed.

    Args:
        target: the directory to create.
        write: writes the files into the given temporary directory and returns the fields of the manifest.
        before_rename: called with the temporary directory once its files are durable.

    Returns:
        The manifest: the fields from `write`, and `files`, file name -> size in bytes.

    Raises:
        ArtifactError: the target already exists.
    """
    temporary = begin_artifact(target)
    try:
        return commit_artifact(temporary, target, write(temporary), before_rename)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def begin_artifact(target: Path) -> Path:
    """Create the temporary directory of `target`; its files are written there before `commit_artifact`.

    Raises:
        ArtifactError: the target already exists.
    """
    if target.exists():
        raise ArtifactError(f"{target} exists already; artifacts are never overwritten")
    temporary = target.parent / f".tmp-{target.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def commit_artifact(
    temporary: Path,
    target: Path,
    fields: Mapping[str, Any],
    before_rename: Callable[[Path], None] = lambda temporary: None,
) -> dict[str, Any]:
    """Write the manifest, fsync all files, rename the directory to `target` and return the manifest.

    The caller removes `temporary` after an error.
    """
    files = {p.name: p.stat().st_size for p in sorted(temporary.iterdir()) if p.name != MANIFEST}
    manifest = {**fields, "files": files}
    (temporary / MANIFEST).write_text(json.dumps(manifest))
    for path in temporary.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, which a server of another user cannot read
        fsync(path)
    fsync(temporary)
    before_rename(temporary)
    temporary.rename(target)
    fsync(target.parent)
    return manifest


def replace_file(file: Path, text: str) -> None:
    """Write a small file atomically and durably."""
    temporary = file.with_name(f".tmp-{file.name}-{os.getpid()}")
    temporary.write_text(text)
    fsync(temporary)
    temporary.rename(file)
    fsync(file.parent)


def remove_artifact(path: Path) -> None:
    """Delete an artifact if it exists. For a symbolic link, the target is deleted as well."""
    if path.is_symlink():
        target = path.resolve()
        path.unlink()  # first, so that no reader follows the link to a partially deleted artifact
        shutil.rmtree(target, ignore_errors=True)
    elif path.exists():
        shutil.rmtree(path)


def read_manifest(path: Path, expected_format: str) -> dict[str, Any]:
    """Read the manifest of the artifact at `path` and check the sizes of its files.

    Raises:
        IncompleteArtifact: the manifest is missing or truncated, or a file is missing or has another size.
        ArtifactError: the format is not the expected one.
    """
    file, absence = path / MANIFEST, f"{path} is not a published artifact"
    try:
        manifest: Any = json.loads(file.read_text())
        found = manifest.get("format") if isinstance(manifest, dict) else None
        if found != expected_format:
            raise ArtifactError(f"{file} has format {found!r}, expected {expected_format!r}")
        if not isinstance(manifest.get("files"), dict):
            raise ArtifactError(f"{file} lists no files")
        for name, size in manifest["files"].items():
            absence = f"its manifest says it has {size} bytes"
            if (found := (path / name).stat().st_size) != size:
                raise IncompleteArtifact(f"{path / name} has {found} bytes, its manifest says {size}")
    except FileNotFoundError as error:
        raise IncompleteArtifact(f"{error.filename} is missing; {absence}") from None
    except ValueError as error:
        raise IncompleteArtifact(f"{file} is not JSON: {error}") from None
    return dict(manifest)


def fsync(path: Path) -> None:
    """Flush the file or directory `path` to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
