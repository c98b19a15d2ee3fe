"""Starts processes as forks of a process that has done their imports, one such process per kind.

The imports take eleven of the fourteen CPU seconds in which an inference server starts, and nearly all of the seconds
in which a fork server of environment workers starts. A fork runs the command from its first line.
`inference_server` with an environment, and every installed command, start real processes.

    python -m tests.support.nursery KIND FD     reads requests from the socket FD; writes {pid}, later {pid, code}
"""

import atexit
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_MESSAGE_BYTES = 1 << 17


class Forked:
    """A forked process with the interface of `subprocess.Popen`.

    Attributes:
        pid: the process id.
        returncode: None until the process has exited.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; raise subprocess.TimeoutExpired after `timeout` seconds."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal if the process runs."""
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended, and its exit code is on the way
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def set_exited(self, code: int) -> None:
        """Record the exit code."""
        self.returncode = code
        self._ended.set()


class Nursery:
    """Client of the forking process of one kind."""

    def __init__(self, kind: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.nursery", kind, str(theirs.fileno())],
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**env, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
        self._children: dict[int, Forked] = {}
        self._started: Forked | None = None
        self._alive = True
        self._start_condition = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self.close)

    def start(self, argv: Sequence[str], env: Mapping[str, str], fds: Sequence[int]) -> Forked:
        """Fork a process that runs the command of this kind with these arguments; the last of `fds` is its stderr."""
        request = json.dumps({"argv": list(argv), "env": dict(env), "cwd": os.getcwd()}).encode()
        assert len(request) <= _MESSAGE_BYTES
        with self._start_condition:
            self._started = None
            socket.send_fds(self._control, [request], fds)
            self._start_condition.wait_for(lambda: self._started or not self._alive, 300)
            assert self._started is not None, "the nursery does not respond"
            return self._started

    def close(self) -> None:
        """Stop the process and its remaining children."""
        self._control.shutdown(socket.SHUT_RDWR)
        self._process.wait(60)

    def _listen(self) -> None:
        while data := self._control.recv(_MESSAGE_BYTES):
            message = json.loads(data)
            if "code" in message:
                self._children.pop(message["pid"]).set_exited(message["code"])
                continue
            with self._start_condition:
                self._started = self._children[message["pid"]] = Forked(message["pid"])
                self._start_condition.notify()
        with self._start_condition:
            self._alive = False
            self._start_condition.notify()


_nurseries: dict[str, Nursery] = {}


def _start(kind: str, argv: Sequence[str], env: Mapping[str, str], fds: Sequence[int]) -> Forked:
    """Start a process from this process's nursery, which the first call creates."""
    if kind not in _nurseries:
        _nurseries[kind] = Nursery(kind)
    return _nurseries[kind].start(argv, env, fds)


def start_forked(argv: Sequence[str], env: Mapping[str, str], log: Path) -> Forked:
    """Start an inference server."""
    with log.open("wb") as file:
        return _start("inference", argv, env, [file.fileno()])


@contextmanager
def forked_worker_launchers() -> Iterator[None]:
    """In this context a `WorkerLauncher` forks its fork server, instead of starting it with a new interpreter."""
    from prime_rl.rollouts.workers import worker_launcher

    def start(argv: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: object) -> Forked:
        return _start("fork_server", argv[4:], env, [*pass_fds, 2])

    forking = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_launcher, "subprocess", forking)
        yield


def _preload_inference() -> None:
    """Import the server's modules, with the environment of a server."""
    from prime_rl.configs.inference import InferenceConfig
    from prime_rl.inference.vllm.engine_arguments import prepare_environment

    prepare_environment(InferenceConfig(), on_cpu=True)
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import prime_rl.inference.server  # noqa: F401


def _run_inference(request: dict[str, Any], _: list[int]) -> None:
    from prime_rl.entrypoints.inference import main

    os.dup2(2, 1)
    sys.argv = ["inference", *request["argv"]]
    main()


def _preload_fork_server() -> None:
    from prime_rl.rollouts.workers import fork_server

    for module in fork_server._PRELOADED:
        importlib.import_module(module)


def _run_fork_server(request: dict[str, Any], fds: list[int]) -> None:
    from prime_rl.rollouts.workers.fork_server import main

    os.setsid()
    path = [entry for entry in sys.path if entry not in ("", str(_ROOT))]  # as with `python -P`
    sys.path[:] = [*filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.argv = ["fork_server", str(fds[0])]
    main()


_KINDS: dict[str, tuple[Callable[[], None], Callable[[dict[str, Any], list[int]], None]]] = {
    "inference": (_preload_inference, _run_inference),
    "fork_server": (_preload_fork_server, _run_fork_server),
}


def _fork_on_request(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a child for each request and report its exit code.

    Returns:
        The request and its file descriptors in a child, None at the end.
    """
    waiting = selectors.DefaultSelector()
    waiting.register(control, selectors.EVENT_READ, None)
    while True:
        for key, _ in waiting.select():
            if key.data is None:
                data, fds, *_ = socket.recv_fds(control, _MESSAGE_BYTES, 2)
                if not data:
                    return None
                pid = os.fork()
                if pid == 0:
                    waiting.close()
                    control.close()
                    return json.loads(data), fds
                for fd in fds:
                    os.close(fd)
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                message = {"pid": pid}
            else:
                _, status = os.waitpid(key.data, 0)
                waiting.unregister(key.fileobj)
                os.close(key.fd)
                message = {"pid": key.data, "code": os.waitstatus_to_exitcode(status)}
            control.send(json.dumps(message).encode())


def _serve(kind: str, fd: int) -> None:
    from prime_rl.liveness.parent_process import die_with_parent

    preload, run = _KINDS[kind]
    preload()
    gc.collect()
    gc.freeze()
    if (job := _fork_on_request(socket.socket(fileno=fd))) is None:
        return
    request, fds = job
    die_with_parent()
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(fds.pop(), 2)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    run(request, fds)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
