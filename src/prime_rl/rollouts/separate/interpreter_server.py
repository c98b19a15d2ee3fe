"""Starts the process in an environment's interpreter that forks one process for each of its workers.

The fork server of the workers starts it before the first of them, so that all workers share its slow imports.
"""

import os
import select
import signal
import socket
import struct
import subprocess
from pathlib import Path
from typing import ClassVar

from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.rollouts.separate import environment_runner
from prime_rl.rollouts.separate.crash_record import CrashRecord

_STATUS = struct.Struct("<i")
_END_SECONDS = 5


class InterpreterServer:
    """A process that forks; it ends with the process that started it, and its forks end with it and their workers."""

    page: ClassVar["int | None"] = None
    """In a worker: the file descriptor of its crash record."""
    _running: ClassVar["dict[str, InterpreterServer]"] = {}

    @classmethod
    def of(cls, interpreter: str) -> "InterpreterServer":
        """Return that of an interpreter, which a worker inherits from its fork server; start it if there is none.

        Raises:
            ConfigError: the interpreter cannot be started.
        """
        server = cls._running.get(interpreter)
        if server is None or server._has_ended():
            if server is not None:
                server._control.close()
            server = cls._running[interpreter] = cls(interpreter)
        return server

    def __init__(self, interpreter: str) -> None:
        """Start the process; see `of`."""
        self._owner = os.getpid()
        path = Path(interpreter)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        environment["VIRTUAL_ENV"] = str(path.parent.parent)
        environment["PATH"] = os.pathsep.join([str(path.parent), os.environ.get("PATH", os.defpath)])
        command = [interpreter, environment_runner.__file__, str(theirs.fileno())]
        with theirs, translate_error(OSError, lambda error: ConfigError(f"{interpreter}: {error.strerror}")):
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )

    def _has_ended(self) -> bool:
        return self._owner == os.getpid() and self._process.poll() is not None

    def fork(self) -> "ForkedInterpreter":
        """Fork a process for this worker, whose stderr it shares. Raises ConfigError if the server has ended."""
        ours, theirs = socket.socketpair()
        status, written = os.pipe()
        worker = os.pidfd_open(os.getpid())
        page = os.dup(self.page) if self.page is not None else CrashRecord.create()[1]
        try:
            with (
                theirs,
                translate_error(OSError, lambda error: ConfigError(f"the interpreter cannot fork: {error.strerror}")),
            ):
                socket.send_fds(self._control, [b"f"], [theirs.fileno(), 2, written, worker, page])
        finally:
            for fd in (written, worker, page):
                os.close(fd)
        return ForkedInterpreter(ours, status)


class ForkedInterpreter:
    """The process of one worker.

    Attributes:
        connection: carries the calls; see `environment_runner`.
        status: file descriptor that is readable when the process has ended.
    """

    def __init__(self, connection: socket.socket, status: int) -> None:
        self.connection, self.status = connection, status

    def wait(self) -> str:
        """Return how it ended. Waits a little for an end that the connection has announced."""
        poll = select.poll()  # `select` refuses descriptors above 1023
        poll.register(self.status, select.POLLIN)
        data = os.read(self.status, _STATUS.size) if poll.poll(_END_SECONDS * 1000) else b""
        if len(data) == _STATUS.size:
            (code,) = _STATUS.unpack(data)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            return f"the interpreter of the environment {how}"
        return "the interpreter of the environment has ended"
