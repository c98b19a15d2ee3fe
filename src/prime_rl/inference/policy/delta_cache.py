"""The newest version as full weights on this node, from which the next version is rebuilt if versions are deltas.

    published                      here (`weights_cache`)
    step_4  full      -- copied -->  <hash of 4>
    step_5  delta     ------------>  <hash of 4> + delta = <hash of 5>, then <hash of 4> is deleted
    step_8  delta     ------------>  <hash of 5> + deltas 6, 7, 8 = <hash of 8>

If the base is missing here (after a restart, or if the server skipped versions), the published bases are followed back
to one that is here, or to full weights. All workers of a node share the directory: the first one rebuilds under a lock.
A version appears by a rename, so it is complete or absent (I4).
"""

import json
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prime_rl.storage.artifact import MANIFEST, WEIGHTS_FORMAT, ArtifactError, read_manifest
from prime_rl.storage.delta.chain import base_of, is_intact, read_base, rebuild
from prime_rl.storage.file_locks import acquire_lock

logger = logging.getLogger(__name__)

_HASH = re.compile("[0-9a-f]{32}")
NUM_THREADS = min(8, max(1, (os.cpu_count() or 1) // 2))
"""Threads of a worker that read or rebuild weights."""
_LOCK_SECONDS = 1200.0  # default time-out of a request (`client.timeout_seconds`): the client does not wait longer


def cache_root(folder: Path | None, port: int) -> Path:
    """Return the cache directory of the server at `port`, inside `folder` or the system's temporary directory."""
    return (folder or Path(tempfile.gettempdir())) / f"prime_rl-weights-{os.getuid()}-{port}"


def make_private(root: Path) -> None:
    """Create a directory for this user alone, if missing. Raises ArtifactError if it belongs to another user."""
    with suppress(FileExistsError):
        root.mkdir(mode=0o700, parents=True)
    found, elsewhere = root.lstat(), "set weights_cache to another directory"
    if not stat.S_ISDIR(found.st_mode):
        raise ArtifactError(f"{root} is not a directory; remove it, or {elsewhere}")
    if found.st_uid != os.getuid():
        raise ArtifactError(f"{root} belongs to another user; {elsewhere}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ArtifactError(f"other users may write to {root}; run chmod 700 {root}, or {elsewhere}")


class DeltaCache:
    """Full versions in a directory of this node, which is created if missing."""

    def __init__(self, root: Path, timeout_seconds: float = _LOCK_SECONDS) -> None:
        """`timeout_seconds` is the longest wait for another worker of this node."""
        self._root, self._timeout_seconds = root, timeout_seconds

    def complete(self, directory: Path, check: Callable[[], None]) -> Path:
        """Return a directory with full weights of a published version, or of a model.

        It is `directory` itself, unless that is a delta or the base of deltas. `check` is called repeatedly and may
        raise to stop.

        Raises:
            ArtifactError: a file is missing, damaged, or differs from its manifest; names the file.
            DeadlineError: another worker held the lock for too long; names the process.
        """
        if (target := self._copy_of(directory)) is None:
            return directory
        with self._locked(check):
            check()
            if not self._is_sound(target):
                shutil.rmtree(target, ignore_errors=True)
                self._make(directory, target, check)
                _mark_sound(target)
            for entry in self._root.iterdir():
                if _HASH.fullmatch(entry.stem) and entry.stem != target.name:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            return target

    def distrust(self, directory: Path) -> bool:
        """Hash the copy of a version at the next `complete`, which rebuilds it if it is damaged.

        Returns whether `complete` returns a copy of `directory`.
        """
        if (target := self._copy_of(directory)) is None:
            return False
        _marker(target).unlink(missing_ok=True)
        return True

    def _copy_of(self, directory: Path) -> Path | None:
        """Return where the copy of a version is kept; None if it is neither a delta nor the base of deltas."""
        if not (directory / MANIFEST).exists():
            return None
        manifest = read_manifest(directory, WEIGHTS_FORMAT)
        return None if manifest.get("delta") is None else self._directory(str(manifest["hash"]), directory)

    def _directory(self, digest: str, directory: Path) -> Path:
        """Return the directory of the version with this hash; raises ArtifactError for anything else."""
        if not _HASH.fullmatch(digest):
            raise ArtifactError(f"{directory / MANIFEST} is malformed: its hash is {digest!r}")
        return self._root / digest

    def _is_sound(self, target: Path) -> bool:
        """Whether the version is here: hashed once, then recognized by the sizes and times of its files.

        Each worker checks the hashes again when it reads the tensors.
        """
        with suppress(OSError, ValueError):  # no marker, or an incomplete one
            if json.loads(_marker(target).read_text()) == _fingerprint(target):
                return True
        if intact := is_intact(target):
            _mark_sound(target)
        return intact

    def _make(self, directory: Path, target: Path, check: Callable[[], None]) -> None:
        """Rebuild `directory` as `target` from a version here, or from published ones if that is damaged."""
        temporary = self._root / ".tmp"
        while True:
            full, deltas = self._find_base(directory)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            try:
                rebuild(full, deltas, temporary, threads=NUM_THREADS, check=check)
                temporary.rename(target)
                return
            except ArtifactError as error:
                if full.parent != self._root or is_intact(full):  # hashed again: its marker may be outdated
                    raise
                logger.warning("%s is damaged (%s); rebuilding from published versions", full, error)
                shutil.rmtree(full)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)

    def _find_base(self, directory: Path) -> tuple[Path, list[Path]]:
        """Follow the bases of a version back to one that is here or is full; return it and the deltas after it."""
        deltas: list[Path] = []
        manifest = read_manifest(directory, WEIGHTS_FORMAT)
        while (base := base_of(directory, manifest)) is not None:
            deltas.insert(0, directory)
            here = self._directory(base.hash, directory)
            if here.is_dir():
                return here, deltas
            manifest = read_base(directory, base)
            directory = directory.parent / base.name
        return directory, deltas

    @contextmanager
    def _locked(self, check: Callable[[], None]) -> Iterator[None]:
        """Exclude the other workers of this node; the kernel releases the lock of a process that dies."""
        make_private(self._root)
        with open(self._root / "lock", "a", opener=_open_no_link) as lock:
            acquire_lock(lock, self._timeout_seconds, "rebuilds weights from deltas", check)
            yield


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _marker(target: Path) -> Path:
    return target.with_name(f"{target.name}.checked")


def _mark_sound(target: Path) -> None:
    _marker(target).write_text(json.dumps(_fingerprint(target)))


def _fingerprint(target: Path) -> dict[str, list[int]]:
    """Return size and modification time of each file."""
    return {file.name: [(found := file.stat()).st_size, found.st_mtime_ns] for file in sorted(target.iterdir())}
