"""Errors and limits of the operating system: one-line messages for failed writes and signals, limit of open files."""

import errno
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prime_rl.core.errors import RunError

_NUM_OPEN_FILES = 65536
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FILES = {errno.EMFILE, errno.ENFILE}
_OTHERS = {errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ENOMEM, errno.ENAMETOOLONG}


class SystemResourceError(RunError):
    """An operation failed because of the operating system: full disk, missing permission, open file limit."""


@contextmanager
def wrap_os_errors(action: str, path: Path) -> Iterator[None]:
    """Replace an OSError of the block by a one-line SystemResourceError.

    Args:
        action: what cannot be done, e.g. `write batch 7`.
        path: location of the write; a message about a full disk includes the free space there.
    """
    try:
        yield
    except OSError as error:
        raise SystemResourceError(f"cannot {action}: {summarize_os_error(error, path)}") from error


def summarize_os_error(error: OSError, path: Path | None = None) -> str:
    """Return the reason, the file, and for a full disk or too many open files the figures that help to fix it."""
    reason = error.strerror or str(error)
    file = error.filename if isinstance(error.filename, str) else path
    line = f"{reason}: {file}" if file else reason
    if error.errno in _DISK and file:
        with suppress(OSError):
            existing = next(place for place in (Path(file), *Path(file).parents) if place.exists())
            line += f" ({shutil.disk_usage(existing).free / 2**20:,.0f} MiB free there)"
    if error.errno in _FILES:
        line += f" (this process may open {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files; raise `ulimit -n`)"
    return line


def is_system_resource_error(error: OSError) -> bool:
    """Return whether the machine caused the error, and not a defect of the program such as a missing file."""
    return error.errno in _DISK | _FILES | _OTHERS


def allow_open_files() -> None:
    """Raise this process's limit of open files to 65,536, or as far as the hard limit permits.

    Each rollout in flight needs a connection, and the usual limit of 1024 would fail a thousand of them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NUM_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _NUM_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def describe_signal(number: int, oom_kills_before: int | None = None) -> str:
    """Return e.g. `was killed by SIGKILL, perhaps out of memory: ...` (`likely_signal_cause`)."""
    cause = likely_signal_cause(number, oom_kills_before)
    return f"was killed by {signal_name(number)}" + (f", {cause}" if cause else "")


def signal_name(number: int) -> str:
    """Return e.g. `SIGKILL`."""
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")


def likely_signal_cause(number: int, oom_kills_before: int | None = None) -> str:
    """Return the likely reason why the kernel sent this signal, "" if unknown.

    `oom_kills_before` is an earlier result of `count_oom_kills`; None if not available.
    """
    if number == signal.SIGKILL:
        import psutil  # every command imports this module, and few need psutil

        memory = psutil.virtual_memory()
        available = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB are available now"
        if oom_kills_before is not None and count_oom_kills() > oom_kills_before:
            return f"and the kernel has killed a process because memory ran out: {available}"
        return f"perhaps out of memory: {available}"
    if number == signal.SIGBUS:
        return "perhaps because a disk or /dev/shm is full, or a file was truncated while it was read"
    return ""


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed because memory ran out; in a container, those inside it."""
    for file in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with suppress(OSError, ValueError):
            for line in Path(file).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0
