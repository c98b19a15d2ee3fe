"""The log: one format for all processes, on stderr and in a file of the run directory. It is for people; no code parses
it.

`set_up_logging` logs to both. A process rotates its own file; `rotating_logs` rotates those to which other processes
write by their stdout and stderr: those under `rl`, and environments.
"""

import fcntl
import logging
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from loguru import logger

from prime_rl.core.terminal_escape import escape_control_chars

MAX_BYTES = 64 << 20
"""Size at which a log file is renamed to `NAME.log.1`, which replaces an older one."""

_SHARED_FILE = "PRIME_RL_LOG_FILE"
"""Environment variable: the log file of a server, to which its engines and workers append."""

_current: "ProcessLogFile | None" = None

_INTERVAL_SECONDS = 10.0


def set_up_logging(level: str, utc: bool, file: Path | None = None) -> None:
    """Log to stderr, with times in UTC or in the local time zone; with several ranks, each line contains the rank.

    The lines also go to `file`, if it is given and stderr does not go to its folder already.
    """
    rank = f" [rank {os.environ['RANK']}]" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    time = "{time:HH:mm:ss!UTC}" if utc else "{time:HH:mm:ss}"
    logger.remove()
    # A message may quote model output.
    logger.configure(patcher=lambda record: record.update({"message": escape_control_chars(record["message"])}))
    line = f"{time} {{level: <7}}{rank} {{message}}"
    # diagnose=True would print the values of variables in tracebacks, including keys.
    logger.add(sys.stderr, level=level.upper(), format=line, diagnose=False)
    if file is None:
        return
    try:
        log_file = open_log_file(file)
    except OSError as error:
        logger.warning("the log goes to stderr only: {} cannot be written: {}", file, error.strerror)
        return
    if log_file is not None:
        logger.add(log_file, level=level.upper(), format=line, diagnose=False)


class ProcessLogFile(RotatingFileHandler):
    """Appends to `path`, and rotates it at `MAX_BYTES`. A full disk ends the file, not the process.

    Processes that a server starts may append to its file; only the process that has created it rotates it.
    """

    def __init__(self, path: Path, rotates: bool = True) -> None:
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(_LineFormatter())
        self._has_ended = False
        self._rotating_pid = os.getpid() if rotates else None

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        """Return whether to rotate the file before `record`; in other processes, follow a rotation."""
        if self._rotating_pid == os.getpid():
            return bool(super().shouldRollover(record))
        if self.stream is not None and not _is_same_file(self.stream.fileno(), self.baseFilename):
            self.stream.close()
            self.stream = self._open()
        return False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless the file has ended."""
        if not self._has_ended:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Report the error on stderr, and end the file."""
        print(f"warning: {self.baseFilename} ends here: {sys.exc_info()[1]}", file=sys.stderr, flush=True)
        self._has_ended = True
        if self.stream is not None:
            with suppress(OSError):
                self.stream.close()
        self.stream = None  # otherwise the interpreter flushes it at its end


class _LineFormatter(logging.Formatter):
    """Keeps lines that loguru has formatted; those of other packages, such as vLLM, get time and level."""

    def format(self, record: logging.LogRecord) -> str:
        if hasattr(record, "extra"):
            return record.getMessage().rstrip("\n")
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        name = getattr(record, "vllm_process_name", record.processName)
        process = "" if name == "MainProcess" else f"[{name}] "
        return f"{when} {record.levelname: <7} {process}{escape_control_chars(super().format(record))}"


def _is_same_file(descriptor: int, path: str) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), Path(path).stat())
    return False


def open_log_file(path: Path) -> ProcessLogFile | None:
    """Open the log file of this process, once, and write that the process starts.

    Returns None if stderr already goes to a file of the same folder, as under `rl` and with torchrun's log folder.
    Raises OSError if the file cannot be opened.
    """
    global _current
    if _current is not None and _current.baseFilename == str(path.absolute()):
        return _current
    stderr = stderr_file()
    if stderr and Path(stderr).is_relative_to(path.parent.resolve()):
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    _current = ProcessLogFile(path)
    append_to_log_file(f"--- pid {os.getpid()} on {socket.gethostname()} starts, {time.strftime('%Y-%m-%d %H:%M:%S')}")
    return _current


def share_log_file() -> logging.Handler | None:
    """Return the log file of this process, to which processes that it starts from now on append as well.

    In such a process: return the file of the server. None if there is no file.
    """
    global _current
    if _current is not None:
        os.environ[_SHARED_FILE] = _current.baseFilename
    elif path := os.environ.get(_SHARED_FILE):
        with suppress(OSError):  # it is reported by the server, which appends to the same file
            _current = ProcessLogFile(Path(path), rotates=False)
    return _current


def append_to_log_file(text: str) -> None:
    """Write `text` to the log file as it is; no effect without one."""
    if _current is not None:
        _current.handle(logging.makeLogRecord({"msg": text, "extra": {}, "levelno": logging.INFO}))


def log_path() -> str:
    """Return the file with the log of this process; "" if it only goes to a terminal or a pipe."""
    return _current.baseFilename if _current is not None else stderr_file()


def stderr_file() -> str:
    """Return the file that stderr is written to; "" for a terminal or a pipe."""
    with suppress(OSError):
        path = Path("/proc/self/fd/2").readlink()
        return str(path) if path.is_file() else ""
    return ""


@contextmanager
def rotating_logs(folder: Path) -> Iterator[None]:
    """Rotate the log files in `folder`, except those that their processes rotate, while the block runs.

    The processes must append (O_APPEND), because they keep their files open.
    """
    ended = threading.Event()

    def rotate_at_intervals() -> None:
        while not ended.wait(_INTERVAL_SECONDS):
            rotate_large_logs(folder)

    thread = threading.Thread(target=rotate_at_intervals, name="log-rotation", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_INTERVAL_SECONDS)


def rotate_large_logs(folder: Path) -> None:
    """Copy each file of more than `MAX_BYTES` to `NAME.log.1`, and empty it. A line in between may be lost."""
    for file in folder.glob("*.log"):
        with suppress(OSError), file.open("rb+") as log:  # it is deleted, or the disk is full: later
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if isinstance(error, BlockingIOError):
                    continue  # another process rotates it; other errors: a file system without locks
            if file.stat().st_size > MAX_BYTES and str(file) != log_path():
                part = file.with_name(f"{file.name}.part")
                try:
                    shutil.copyfile(file, part)
                    part.replace(file.with_name(f"{file.name}.1"))
                    log.truncate(0)
                finally:
                    part.unlink(missing_ok=True)
