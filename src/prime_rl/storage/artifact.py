"""Artifacts: directories that appear atomically and complete, or not at all (I4).

Files are written to a temporary directory next to the target, described by `manifest.json`, fsynced, and committed by
renaming the directory. Readers check the files against the manifest. Over a network file system, a rename may become
visible before the renamed files: a new artifact that appears incomplete is read again until `visibility_timeout`. On a
local disk it is damaged.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from prime_rl.core.errors import RunError

MANIFEST = "manifest.json"
WEIGHTS_FORMAT = "prime_rl.weights/1"
"""Format of `weights/step_n`, which the trainer writes and inference loads."""


Value = TypeVar("Value")

_NETWORK_SECONDS = 60.0
"""Longest time for which NFS clients cache a directory (acdirmax)."""

_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "apfs", "hfs", "vfat"}

_RETRY_SECONDS = 0.1


class ArtifactError(RunError):
    """An artifact is incomplete or invalid; the message names the file."""


class NewerFormat(ArtifactError):
    """A newer release has written the artifact."""


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
    """Write a small file atomically and durably, in UTF-8."""
    temporary = file.with_name(f".tmp-{file.name}-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
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


def check_format(file: Path, found: object, ours: str) -> None:
    """Accept a format `NAME/NUMBER` of this release or an older one.

    Raises:
        NewerFormat: the number is higher than ours.
        ArtifactError: it is another format.
    """
    name, _, number = str(found).rpartition("/")
    own_name, _, own_number = ours.rpartition("/")
    if name != own_name or not number.isdecimal():
        raise ArtifactError(f"{file} has format {found!r}, expected {ours!r}")
    if int(number) > int(own_number):
        raise NewerFormat(
            f"{file} has format {found}, and this release of prime-rl reads {ours}; update prime-rl "
            "(docs/deployment.md#upgrades), or choose another directory"
        )


def read_manifest(path: Path, expected_format: str) -> dict[str, Any]:
    """Read the manifest of the artifact at `path` and check the sizes of its files.

    Raises:
        IncompleteArtifact: the manifest is missing or truncated, or a file is missing or has another size.
        ArtifactError: as `check_format`.
    """
    file, absence = path / MANIFEST, f"{path} is not a published artifact"
    try:
        manifest: Any = json.loads(file.read_text())
        found = manifest.get("format") if isinstance(manifest, dict) else None
        check_format(file, found, expected_format)
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


def visibility_timeout(place: Path, configured: float | None = None) -> float:
    """Return how long a new artifact at `place` may be incomplete, by default depending on the file system."""
    if configured is not None:
        return configured
    return 0.0 if is_local(place.parent) else _NETWORK_SECONDS


@lru_cache(maxsize=64)
def is_local(directory: Path) -> bool:
    """Return whether `directory` is on a local file system; True if unknown."""
    import psutil  # slow to import, and most readers do not need it

    path = directory.resolve()
    mounted = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    return not mounted or max(mounted, key=lambda part: len(part.mountpoint)).fstype in _LOCAL


def retry_until_complete(
    read: Callable[[], Value], timeout_seconds: float, check: Callable[[], None] = lambda: None
) -> Value:
    """Call `read` until it raises no IncompleteArtifact, or raise that error after the timeout.

    `check` is called between attempts and raises to abort the wait.
    """
    deadline = time.monotonic() + timeout_seconds
    pause = threading.Event()
    while True:
        try:
            return read()
        except IncompleteArtifact as error:
            if not timeout_seconds:
                raise
            if time.monotonic() >= deadline:
                waited = f"still so after {timeout_seconds:g} s (fs_consistency_timeout_seconds)"
                raise IncompleteArtifact(f"{error}; {waited}") from None
        check()
        pause.wait(_RETRY_SECONDS)  # another machine's cache sends no events
