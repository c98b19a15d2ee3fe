"""The log file of a process in its run directory, which has what stderr has."""

import logging
import os
import socket
import sys
import time
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from prime_rl.core.terminal_escape import escape_control_chars

MAX_BYTES = 64 << 20
"""Size at which a log file is renamed to `NAME.log.1`, which replaces an older one."""
_SHARED_FILE = "PRIME_RL_LOG_FILE"
"""Environment variable: the log file of a server, to which its engines and workers append."""


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


_current: ProcessLogFile | None = None


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
