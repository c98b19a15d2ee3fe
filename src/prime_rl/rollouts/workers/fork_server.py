"""The process that environment workers are forked from, after slow imports.

A fork takes milliseconds, a new interpreter takes seconds; the workers also share the imported pages. The threads,
sockets and data of an environment are created in its worker, after the fork. Each worker leads a session, so that its
child processes end with it. Parent-death signals end this process with the orchestrator, and the workers with this
process.
"""

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from prime_rl.core.entry_point import repair_timeouts
from prime_rl.core.errors import ConfigError
from prime_rl.core.os_errors import allow_open_files
from prime_rl.liveness.parent_process import die_with_parent
from prime_rl.rollouts.separate.crash_record import CrashRecord
from prime_rl.rollouts.separate.interpreter_server import InterpreterServer

_PRELOADED = (
    "transformers.tokenization_utils_tokenizers",
    "prime_rl.rollouts.workers.worker_main",
    "prime_rl.rollouts.verifiers.verifiers_classic",
    "datasets",
    "verifiers.legacy.utils.env_utils",  # imports what verifiers otherwise loads at the first access
)
_DATAGRAM = 65536


class Fork(msgspec.Struct, tag="fork", frozen=True):
    """Start a worker; the message carries the file descriptors of its connection and its crash record.

    Attributes:
        log: file of its output; None for stderr.
        interpreter: that of its environment, if it has one.
    """

    log: str | None
    interpreter: str | None = None


class Kill(msgspec.Struct, tag="kill", frozen=True):
    """Kill a worker and its child processes, if it has not exited."""

    pid: int


class Preload(msgspec.Struct, tag="preload", frozen=True):
    """Request to the fork server: import a module before the next fork."""

    module: str


class Forked(msgspec.Struct, tag="forked", frozen=True):
    """The worker of the oldest unanswered `Fork` has started."""

    pid: int


class Exited(msgspec.Struct, tag="exited", frozen=True):
    """A worker has exited: its exit code, or minus the number of the signal that killed it."""

    pid: int
    status: int


Command = Fork | Kill | Preload
Event = Forked | Exited

decode_event = msgspec.msgpack.Decoder(Event).decode
_decode_command = msgspec.msgpack.Decoder(Command).decode
encode = msgspec.msgpack.Encoder().encode


Job = tuple[socket.socket, CrashRecord]
"""What a new worker gets: its connection to the orchestrator, and its crash record."""


class ForkServer:
    """Forks and kills workers on command, and reaps them and their child processes."""

    def __init__(self, control: socket.socket) -> None:
        """Serve the commands that arrive on `control`, a SOCK_SEQPACKET socket."""
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._pidfds: dict[int, int] = {}

    def serve(self) -> Job | None:
        """Return a job in each forked process; return None in this process when the orchestrator disconnects."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._reap(key.data)
                    continue
                data, fds, *_ = socket.recv_fds(self._control, _DATAGRAM, 2, socket.MSG_CMSG_CLOEXEC)
                if not data:
                    self._kill_all()
                    return None
                match _decode_command(data):
                    case Fork() as command:
                        if (job := self._fork(command, *fds)) is not None:
                            return job
                    case Kill(pid):
                        if pid in self._pidfds:  # not reaped yet, so the process id is not reused
                            _kill_session(pid)
                    case Preload(module):
                        with suppress(ImportError):  # the worker that needs it raises
                            importlib.import_module(module)

    def _fork(self, command: Fork, connection: int, page: int) -> Job | None:
        if command.interpreter is not None:
            with suppress(ConfigError):  # the worker, which inherits it, tries again and raises
                InterpreterServer.of(command.interpreter)
        pid = os.fork()
        if pid == 0:
            self._become_worker(command.log)
            crash_record = CrashRecord.map(page)
            InterpreterServer.page = page
            return socket.socket(fileno=connection), crash_record
        os.close(connection)
        os.close(page)
        pidfd = os.pidfd_open(pid)
        self._pidfds[pid] = pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, pid)
        self._send(Forked(pid))
        return None

    def _become_worker(self, log: str | None) -> None:
        os.setsid()
        die_with_parent()
        self._selector.close()
        self._control.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        if log is not None:
            Path(log).parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            os.close(fd)
        np.random.seed()  # the fork copies the global generator; all workers would draw the same numbers

    def _reap(self, pid: int) -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        _kill_session(pid)  # before it is reaped, because then its id may be reused
        _, status = os.waitpid(pid, 0)
        pidfd = self._pidfds.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._send(Exited(pid, os.waitstatus_to_exitcode(status)))

    def _kill_all(self) -> None:
        for pid in self._pidfds:
            _kill_session(pid)
        for pid in self._pidfds:
            os.waitpid(pid, 0)

    def _send(self, event: Event) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the next recv returns no data
            self._control.send(encode(event))


def _kill_session(pid: int) -> None:
    with suppress(ProcessLookupError):  # just forked: it has no session yet
        os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def main() -> None:
    """Serve the socket whose file descriptor is the argument."""
    die_with_parent()
    repair_timeouts()
    os.dup2(2, 1)  # environments print to stdout, which belongs to the orchestrator
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    for module in _PRELOADED:
        with suppress(ImportError):  # a verifiers release without the classic API
            importlib.import_module(module)
    allow_open_files()
    gc.collect()
    gc.freeze()  # otherwise garbage collection in the workers would write to the shared pages and copy them
    job = ForkServer(control).serve()
    if job is not None:
        from prime_rl.rollouts.workers.worker_main import work

        work(*job)


if __name__ == "__main__":
    main()
