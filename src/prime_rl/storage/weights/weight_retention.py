"""Deletes published versions that no process needs.

A version is needed while a process samples from it, reads it, or may load it later, and while a version that is needed
is a delta against it (`delta.base` of the manifest).
"""

import fcntl
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from loguru import logger

from prime_rl.storage.artifact import MANIFEST, ArtifactError, remove_artifact
from prime_rl.storage.paths import step_of, steps_in

_DELETED = ".deleted-"


def removable_versions(base_of: Mapping[int, int | None], oldest_sampled: int, needed: Iterable[int] = ()) -> list[int]:
    """Return the steps of the published versions that may be deleted, ascending.

    Args:
        base_of: step of each published version -> step of the version that it is a delta against; None if full.
        oldest_sampled: the oldest version that a server samples from. It and newer versions are kept.
        needed: steps of further versions to keep.
    """
    newer = {step for step in base_of if step >= oldest_sampled}
    newest = {max(base_of)} if base_of else set()  # a restarted server loads the newest version
    kept = set[int]()
    for step in newer | newest | set(needed):
        current: int | None = step
        while current is not None and current not in kept:
            kept.add(current)
            current = base_of.get(current)
    return sorted(base_of.keys() - kept)


def remove_old_versions(weights_dir: Path, oldest_sampled: int, needed: Set[int]) -> list[int]:
    """Delete the `removable_versions` of `weights_dir`, and return their steps.

    Versions on which another process has a `hold_version`, and their bases, are kept.
    """
    for leftover in weights_dir.glob(f"{_DELETED}*"):  # of a killed process, or files that were open elsewhere
        remove_artifact(leftover)
    base_of = dict[int, int | None]()
    for step in steps_in(weights_dir):
        base_of[step] = None
        with suppress(OSError, ValueError, KeyError, TypeError):  # a full version, or a manifest that cannot be read
            manifest: Any = json.loads((weights_dir / f"step_{step}" / MANIFEST).read_text())
            base_of[step] = step_of(Path(str(manifest["delta"]["base"])))
    candidates = removable_versions(base_of, oldest_sampled, needed)
    while held := {step for step in candidates if not _run_if_free(weights_dir / f"step_{step}")}:
        needed = needed | held
        candidates = removable_versions(base_of, oldest_sampled, needed)
    # The newest first: if this process dies in between, the remaining deltas still have their bases.
    return [s for s in reversed(candidates) if remove_if_free(weights_dir / f"step_{s}")][::-1]


def remove_if_free(version: Path) -> bool:
    """Delete a version unless another process has a `hold_version`; return whether it is deleted.

    It is hidden by a rename first, and its files are deleted when its manifest is closed: NFS and FUSE keep a deleted
    file that is open under another name, and so its directory.
    """
    hidden = version.with_name(f"{_DELETED}{version.name}")
    if not _run_if_free(version, lambda version: version.rename(hidden)):
        return False
    remove_artifact(hidden)
    return True


@contextmanager
def hold_version(version: Path) -> Iterator[None]:
    """Prevent the run from deleting a published version during this block.

    This takes a shared lock (flock) on its manifest, which the kernel releases if the process dies. A file system
    without locks only causes a warning.

    Raises:
        ArtifactError: the version is deleted, or being deleted.
    """
    try:
        manifest = (version / MANIFEST).open("rb")
    except OSError as error:
        raise ArtifactError(f"{version / MANIFEST} cannot be read: {error.strerror}") from None
    with manifest:
        problem = _lock(manifest, fcntl.LOCK_SH)
        if isinstance(problem, BlockingIOError):
            raise ArtifactError(f"{version} is being deleted by its run")
        if problem is not None:
            logger.warning("weights {} cannot be locked, so their run may delete them: {}", version, problem.strerror)
        if not (version / MANIFEST).exists():
            raise ArtifactError(f"{version} was just deleted by its run")
        yield


def _run_if_free(version: Path, action: Callable[[Path], object] = lambda version: None) -> bool:
    """Run `action` under an exclusive lock on `version`; return whether no other process holds it."""
    with ExitStack() as stack:
        manifest = None
        with suppress(OSError):  # without a manifest, nothing can hold it
            # An exclusive lock over NFS requires a writable file.
            manifest = stack.enter_context((version / MANIFEST).open("rb+"))
        if manifest is not None and isinstance(_lock(manifest, fcntl.LOCK_EX), BlockingIOError):
            return False
        action(version)
    return True


def _lock(manifest: IO[bytes], kind: int) -> OSError | None:
    """Lock a manifest; return BlockingIOError if another process holds it, others if the file system has no locks."""
    try:
        fcntl.flock(manifest, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None
