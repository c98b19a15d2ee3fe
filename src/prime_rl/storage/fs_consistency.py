"""Reading artifacts over network file systems, where a rename may become visible before the renamed files (I4).

There, a new artifact that appears incomplete is read again until `visibility_timeout`. On a local disk it is damaged.
"""

import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import psutil

from prime_rl.storage.artifact import IncompleteArtifact

Value = TypeVar("Value")

_NETWORK_SECONDS = 60.0
"""Longest time for which NFS clients cache a directory (acdirmax)."""
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "apfs", "hfs", "vfat"}
_RETRY_SECONDS = 0.1


def visibility_timeout(place: Path, configured: float | None = None) -> float:
    """Return how long a new artifact at `place` may be incomplete, by default depending on the file system."""
    if configured is not None:
        return configured
    return 0.0 if is_local(place.parent) else _NETWORK_SECONDS


@lru_cache(maxsize=64)
def is_local(directory: Path) -> bool:
    """Return whether `directory` is on a local file system; True if unknown."""
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
