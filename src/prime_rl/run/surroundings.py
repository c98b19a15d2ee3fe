"""What the machine refuses, or kills, is told in one line: what could not be done, why, where, and what would help.

A disk without room, a directory that cannot be written, no file descriptors left: none of these is a defect of the
program, and none is worth a traceback.
"""

import errno
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from prime_rl.errors import RunError

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FILES = {errno.EMFILE, errno.ENFILE}
_OTHERS = {errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ENOMEM, errno.ENAMETOOLONG}


class SurroundingsError(RunError):
    """The machine refused; the message says what, why and where."""


@contextmanager
def told(what: str, place: Path) -> Iterator[None]:
    """Turn the OSError of a write into one line.

    Args:
        what: that cannot be done, e.g. `write batch 7`.
        place: where; the room that is left there is told with a disk that is full.

    Raises:
        SurroundingsError: in place of the OSError.
    """
    try:
        yield
    except OSError as error:
        raise SurroundingsError(f"cannot {what}: {describe(error, place)}") from error


def describe(error: OSError, place: Path | None = None) -> str:
    """What the operating system says, of which file, and what would help."""
    said = error.strerror or str(error)
    file = error.filename if isinstance(error.filename, str) else None
    where = file or (str(place) if place is not None else None)
    line = f"{said}: {where}" if where else said
    if error.errno in _DISK and (free := _free(Path(where) if where else None)) is not None:
        line += f" ({free / 2**20:,.0f} MiB free there)"
    if error.errno in _FILES:
        line += f" (this process may open {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files; raise `ulimit -n`)"
    return line


def is_surroundings(error: OSError) -> bool:
    """Whether the machine is to blame, and not a defect of the program such as a file that was never written."""
    return error.errno in _DISK | _FILES | _OTHERS


def _free(place: Path | None) -> int | None:
    """Bytes that are free where `place` is, or would be."""
    while place is not None:
        with suppress(OSError):
            return shutil.disk_usage(place).free
        if place.parent == place:
            return None
        place = place.parent
    return None


def how_it_died(number: int, kills: int | None = None) -> str:
    """Say of a process that this signal killed it, and what may be behind that (`killers`)."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    perhaps = killers(number, kills)
    return f"was killed by {name}" + (f", {perhaps}" if perhaps else "")


def killers(number: int, kills: int | None = None) -> str:
    """Say who sends this signal, where the machine does.

    Args:
        number: of the signal.
        kills: what `oom_kills` said before; None if nobody asked.
    """
    if number == signal.SIGKILL:
        memory = psutil.virtual_memory()
        there = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB are available now"
        if kills is not None and oom_kills() > kills:
            return f"and the kernel has meanwhile killed for want of memory: {there}"
        return f"perhaps for want of memory: {there}"
    if number == signal.SIGBUS:
        return "perhaps because a disk or /dev/shm is full, or a file was cut short while it was read"
    return ""


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory, in this container where that is counted."""
    for file, prefix in (("/sys/fs/cgroup/memory.events", "oom_kill "), ("/proc/vmstat", "oom_kill ")):
        with suppress(OSError, ValueError):
            for line in Path(file).read_text().splitlines():
                if line.startswith(prefix):
                    return int(line.split()[1])
    return 0
