"""I7: a lock between processes is waited for with a deadline, and whoever holds it is named."""

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from prime_rl.run.wait import DeadlineError

_AGAIN_S = 0.1


def acquire(file: IO[str], timeout_s: float, what: str, check: Callable[[], None] = lambda: None) -> None:
    """Lock an open file for this process alone; closing it lets go.

    Args:
        file: the lock.
        timeout_s: longest wait for it.
        what: the holder does, for the error.
        check: called in between; raises what makes waiting pointless.

    Raises:
        DeadlineError: somebody else held it all the time; names the process where that is known.
        OSError: the file system has no locks.
    """
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    f"waited {timeout_s:.0f} s for {holder(Path(file.name))}, which {what} (lock {file.name})"
                ) from None
        check()
        pause.wait(_AGAIN_S)


def holder(path: Path) -> str:
    """Name the process of this machine that holds a lock (flock) on `path`."""
    pids = [pid for pid in _holders(path) if pid != os.getpid()]
    if not pids:
        return "another process"
    try:
        command = Path(f"/proc/{pids[0]}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = ""
    return f"process {pids[0]}" + (f" ({command[:120]})" if command else "")


def _holders(path: Path) -> list[int]:
    """Process ids from the kernel's table of locks, which names files by device and inode."""
    try:
        status, table = path.stat(), Path("/proc/locks").read_text()
    except OSError:
        return []
    wanted = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
    found = []
    for line in table.splitlines():
        fields = line.split()
        if len(fields) < 6 or fields[1] != "FLOCK" or fields[5].count(":") != 2:
            continue
        major, minor, inode = fields[5].split(":")
        if (int(major, 16), int(minor, 16), int(inode)) == wanted:
            found.append(int(fields[4]))
    return found
