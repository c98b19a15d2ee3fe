"""I4 over a network: a rename may be seen before what it renamed.

A client of a network file system looks at directories, names, sizes and contents at different times. So an artifact
that has just appeared and is not whole yet is read again, as long as `patience` says; on a local disk it is damaged.
"""

import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import psutil

from prime_rl.run.artifact import Incomplete

Value = TypeVar("Value")

NETWORK_S = 60.0
"""As long as NFS clients may go by what they knew of a directory (acdirmax)."""
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "apfs", "hfs", "vfat"}
_AGAIN_S = 0.1


def patience(place: Path, configured: float | None = None) -> float:
    """Seconds that what has appeared at `place` may take to be whole; None lets the kind of file system decide."""
    if configured is not None:
        return configured
    return 0.0 if is_local(place.parent) else NETWORK_S


@lru_cache(maxsize=64)
def is_local(directory: Path) -> bool:
    """Whether only this machine can write there; true where it cannot be told."""
    path = str(directory.resolve())
    mounted = [part for part in psutil.disk_partitions(all=True) if _is_below(path, part.mountpoint)]
    return not mounted or max(mounted, key=lambda part: len(part.mountpoint)).fstype in _LOCAL


def settled(read: Callable[[], Value], patience_s: float, check: Callable[[], None] = lambda: None) -> Value:
    """Call `read` until what it reads is whole.

    Args:
        read: raises Incomplete as long as something is not there.
        patience_s: longest time for that.
        check: called in between; raises what makes waiting pointless.

    Raises:
        Incomplete: of the last try, when the time is up.
    """
    deadline = time.monotonic() + patience_s
    pause = threading.Event()
    while True:
        try:
            return read()
        except Incomplete as error:
            if time.monotonic() >= deadline:
                if patience_s:
                    raise Incomplete(f"{error}; it was looked at for {patience_s:g} s (visibility_seconds)") from None
                raise
        check()
        pause.wait(_AGAIN_S)  # no event tells: this is the other machine's cache


def _is_below(path: str, mountpoint: str) -> bool:
    return path == mountpoint or path.startswith(mountpoint.rstrip("/") + "/")
