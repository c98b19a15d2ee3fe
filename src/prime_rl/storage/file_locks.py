"""File locks between processes (flock): waiting with a deadline, the holder's pid, and the lock of a run directory."""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from prime_rl.core.errors import ConfigError, RunError, summarize_exception, translate_error
from prime_rl.storage.artifact import ArtifactError, check_format, replace_file
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import START_VARIABLE
from prime_rl.storage.wait_for import DeadlineError

_RETRY_SECONDS = 0.1
_PREDECESSOR_SECONDS = 10.0
"""Time for the children of a predecessor that was killed, which may exit after it."""
RUN_FORMAT = "prime_rl.run/1"
"""Format of a run directory, which increases when a release could misread the directories of another one."""
_WRITERS = ("orchestrator", "trainer", "sft")
"""Roles whose processes write a run directory, also without `rl`."""
_role_locks: dict[Path, tuple[int, IO[str]]] = {}
"""The process that has locked each path, and the open file."""


def check_run_format(paths: RunPaths) -> bool:
    """Return whether a run directory has the number of its format; one of the first releases has none.

    Raises ConfigError if a newer release has written the directory, or the number cannot be read.
    """
    try:
        check_format(paths.format, json.loads(paths.format.read_text())["format"], RUN_FORMAT)
    except FileNotFoundError:
        return False
    except ArtifactError as error:
        raise ConfigError(f"output_dir: {error}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"output_dir: {paths.format} cannot be read ({summarize_exception(error)}); restore it, or choose another "
            "directory with --exp-id or --output-dir"
        ) from None
    return True


def _record_run_format(paths: RunPaths) -> None:
    if not check_run_format(paths):
        replace_file(paths.format, json.dumps({"format": RUN_FORMAT}) + "\n")


def acquire_lock(file: IO[str], timeout_seconds: float, what: str, check: Callable[[], None] = lambda: None) -> None:
    """Lock an open file exclusively; closing it releases the lock.

    Args:
        what: activity of the holder, for the error.
        check: called between attempts; raises to abort the wait.

    Raises:
        DeadlineError: another process held the lock all the time; names it if possible.
        OSError: the file system does not support locks.
    """
    deadline = time.monotonic() + timeout_seconds
    while not _try_to_lock(file):
        if time.monotonic() >= deadline:
            holder = describe_lock_holder(Path(file.name))
            raise DeadlineError(f"waited {timeout_seconds:.0f} s for {holder}, which {what} (lock {file.name})")
        check()
        time.sleep(_RETRY_SECONDS)


@contextmanager
def hold_run_lock(paths: RunPaths) -> Iterator[None]:
    """Hold the lock of a run directory, creating the directory if needed. The kernel releases it at any exit.

    After a ConfigError or Ctrl-C it removes what it has created, if nothing else is there. On a file system without
    locks, such as Lustre mounted without `flock`, it prints a warning and protects nothing.

    Raises:
        ConfigError: another run holds the lock, or the directory is not writable or of a newer release.
    """
    problem = f"output_dir = {paths.root} cannot be written"
    missing = [folder for folder in (paths.root, *paths.root.parents) if not os.path.lexists(folder)]
    is_new = not os.path.lexists(paths.lock)
    with translate_error(OSError, lambda error: ConfigError(f"{problem}: {error.strerror}; set --output-dir")):
        paths.root.mkdir(parents=True, exist_ok=True)
        check_run_format(paths)
        file = paths.lock.open("a+")
    with file:
        try:
            is_free = _try_to_lock(file) and _is_at(paths.lock, file)
        except OSError as error:
            is_free = True
            print(
                f"warning: {paths.root} cannot be locked ({error.strerror}): start one run at a time", file=sys.stderr
            )
        if not is_free:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise ConfigError(
                f"output_dir = {paths.root} is in use by another run (process {owner}); "
                "choose another with --exp-id or --output-dir"
            )
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        except (ConfigError, KeyboardInterrupt):  # a refused start
            if is_new and not (paths.root / "configs").exists():
                paths.lock.unlink(missing_ok=True)
                with suppress(OSError):  # the user's files
                    for folder in missing:
                        folder.rmdir()
            raise


def check_no_writer(paths: RunPaths, timeout_seconds: float = _PREDECESSOR_SECONDS) -> None:
    """Check that no process writes a run directory, such as a trainer that a user has started without `rl`.

    Raises:
        RunError: as `hold_role_lock`, for any role.
    """
    for role in _WRITERS:
        path = paths.role_lock(role)
        with suppress(OSError), _translate_held(paths, role), path.open("r+") as file:
            acquire_lock(file, timeout_seconds, f"is the {role}")


def hold_role_lock(paths: RunPaths, role: str, timeout_seconds: float = _PREDECESSOR_SECONDS) -> None:
    """Lock a run directory for this process until it exits. No effect where it cannot be written or locked.

    A start with a name (`START_VARIABLE`) never fails: it takes the run over from a process that is left
    (`take_over`).

    Args:
        role: `orchestrator`, for example; two of them in one directory would mix their files.
        timeout_seconds: longest wait for the process that holds it.

    Raises:
        ConfigError: the directory is a file, or of a newer release.
        RunError: another process holds the lock. Not bad input, so that a scheduler tries again.
    """
    path = paths.role_lock(role)
    if _role_locks.get(path, (0, None))[0] == os.getpid():
        return

    if paths.root.is_file():
        raise ConfigError(f"output_dir = {paths.root} is a file; set --output-dir")
    with suppress(OSError), _translate_held(paths, role):
        paths.root.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # a full disk, where the lock can still be taken
            _record_run_format(paths)
        file = path.open("a")
        if os.environ.get(START_VARIABLE):
            _try_to_lock(file)
        else:
            acquire_lock(file, timeout_seconds, f"is the {role}")
        _role_locks[path] = os.getpid(), file


def _translate_held(paths: RunPaths, role: str) -> AbstractContextManager[None]:
    """Name the holder of a role's lock instead of the wait for it."""

    def is_held(_: DeadlineError) -> RunError:
        holder = describe_lock_holder(paths.role_lock(role))
        return RunError(
            f"output_dir = {paths.root} is in use: {holder} is its {role}; stop it, or choose another directory"
        )

    return translate_error(DeadlineError, is_held)


def _try_to_lock(file: IO[str]) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _is_at(path: Path, file: IO[str]) -> bool:
    """Return whether `path` is still this open file: a refused start removes its lock."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def describe_lock_holder(path: Path) -> str:
    """Return pid and command of the process on this machine that holds a lock on `path`, for an error message."""
    pids = [pid for pid in find_lock_holders(path) if pid != os.getpid()]
    if not pids:
        return "another process"
    with suppress(psutil.Error):
        if command := psutil.Process(pids[0]).cmdline():
            return f"process {pids[0]} ({' '.join(' '.join(command).split())[:120]})"
    return f"process {pids[0]}"


def find_lock_holders(path: Path) -> list[int]:
    """Return the ids of the processes on this machine that hold a lock on `path`, without touching the lock."""
    with suppress(OSError):
        status, table = path.stat(), Path("/proc/locks").read_text()
        # The kernel identifies files by device (in hexadecimal) and inode. A waiting process has "->" as second field.
        file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        rows = [line.split() for line in table.splitlines()]
        return [int(row[4]) for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5] == file]
    return []
