"""Which published versions may be deleted: those that nobody can need any more, and no other.

A version is needed by whoever samples from it, reads it or may go back to it, and by every version that is a delta
against it (`delta.base` of the manifest). What is newer than anything that is sampled from is still to be read.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loguru import logger

from prime_rl.run.artifact import MANIFEST, ArtifactError, remove
from prime_rl.run.paths import step_of, steps_in


def removable(base_of: Mapping[int, int | None], oldest_sampled: int, needed: Iterable[int] = ()) -> list[int]:
    """Return the steps of the published versions that may go, ascending. Pure.

    Args:
        base_of: step of each published version -> step of the version that it is a delta against, None if it is whole.
        oldest_sampled: the oldest version that a server samples from; a server that comes back starts with the newest.
        needed: steps of older ones that somebody reads, or will.

    Returns:
        Those that are older than `oldest_sampled` and that no chain of deltas from one that stays leads to.
    """
    ahead = {step for step in base_of if step >= oldest_sampled}
    newest = {max(base_of)} if base_of else set()  # whatever the servers say: a restart begins with it
    stays = set[int]()
    for step in ahead | newest | set(needed):
        follow: int | None = step
        while follow is not None and follow not in stays:
            stays.add(follow)
            follow = base_of.get(follow)
    return sorted(base_of.keys() - stays)


def clean(weights_dir: Path, oldest_sampled: int, needed: Set[int]) -> list[int]:
    """Delete what may go of `weights_dir`, and return its steps; see `removable`.

    Also left in place is what another process has put a `hold` on, and what that builds upon.

    Raises:
        OSError: something cannot be deleted.
    """
    published = steps_in(weights_dir)
    base_of = {step: _base_of(weights_dir / f"step_{step}") for step in published}
    while True:
        candidates = removable(base_of, oldest_sampled, needed)
        if held := {step for step in candidates if _is_held(weights_dir / f"step_{step}")}:
            needed = needed | held
            continue
        break
    # The newest first: whatever is left when this process dies here still has what it builds upon.
    return [step for step in reversed(candidates) if _delete(weights_dir / f"step_{step}")][::-1]


@contextmanager
def hold(version: Path) -> Iterator[None]:
    """Keep a published version from being deleted by the run that it is of, as long as this block or process lasts.

    The hold is a shared lock (flock) on its manifest: nothing is left of it when this process dies. On a file system
    without such locks it holds nothing, with a warning.

    Raises:
        ArtifactError: the version is gone, or is being deleted.
    """
    try:
        descriptor = os.open(version / MANIFEST, os.O_RDONLY)
    except OSError as error:
        raise ArtifactError(f"{version / MANIFEST} cannot be read: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArtifactError(f"{version} is being deleted by the run that it is of") from None
        except OSError as error:
            logger.warning("{} cannot be held, a run may delete it: {}", version, error.strerror)
        if not (version / MANIFEST).exists():
            raise ArtifactError(f"{version} has just been deleted by the run that it is of")
        yield
    finally:
        os.close(descriptor)


def _base_of(version: Path) -> int | None:
    """Step of the version beside it that `version` is a delta against."""
    try:
        manifest: Any = json.loads((version / MANIFEST).read_text())
        return step_of(Path(str(manifest["delta"]["base"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # whole, or so damaged that no reader gets as far as its base


def _is_held(version: Path) -> bool:
    with _locked(version) as ours:
        return not ours


def _delete(version: Path) -> bool:
    """Delete a version, unless somebody holds it by now."""
    with _locked(version) as ours:
        if ours:
            remove(version)
        return ours


@contextmanager
def _locked(version: Path) -> Iterator[bool]:
    """Try to keep all others from holding `version`; tells whether nobody does."""
    try:
        descriptor = os.open(version / MANIFEST, os.O_RDWR)  # an exclusive lock over NFS asks for a writable file
    except OSError:
        yield True  # without a manifest nobody can hold it
        return
    try:
        ours = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            ours = False
        except OSError:
            pass  # a file system without locks: nobody can hold it
        yield ours
    finally:
        os.close(descriptor)
