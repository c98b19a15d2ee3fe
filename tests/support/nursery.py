"""Inference servers that are forked from a process which has imported vLLM.

Importing takes eleven of the fourteen CPU seconds of a start, and two dozen tests start a server. What is forked runs
`uv run inference` from its first line on, in a process of its own; that the command itself starts, and how fast, is
seen where `inference_server` is given an environment, and in every `rl`.

    python -m tests.support.nursery     waits on stdin for {argv, env, log}; answers {pid}, later {pid, code}
"""

import atexit
import gc
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


class Forked:
    """A forked process, as `subprocess.Popen` shows one.

    Attributes:
        pid: its process id.
        returncode: None until it has ended.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended; subprocess.TimeoutExpired if it does not in time."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def has_ended(self, code: int) -> None:
        """Note its exit code."""
        self.returncode = code
        self._ended.set()


class Nursery:
    """The process that forks, as its user sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.nursery"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        self._children: dict[int, Forked] = {}
        self._newborn: Forked | None = None
        self._born = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self.close)

    def start(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> Forked:
        """Fork a process that runs `inference` with these arguments."""
        assert self._process.stdin is not None
        request = {"argv": list(argv), "env": dict(env), "log": str(log.resolve())}
        with self._born:
            self._newborn = None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            assert self._born.wait_for(lambda: self._newborn is not None, 300), "the nursery does not answer"
            assert self._newborn is not None
            return self._newborn

    def close(self) -> None:
        """End it, and so whatever of its children is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if "code" in told:
                self._children.pop(told["pid"]).has_ended(told["code"])
                continue
            with self._born:
                self._newborn = self._children[told["pid"]] = Forked(told["pid"])
                self._born.notify()


_nursery: Nursery | None = None


def start_forked(argv: Sequence[str], env: Mapping[str, str], log: Path) -> Forked:
    """Start a server from this process's nursery, which is made with the first."""
    global _nursery
    if _nursery is None:
        _nursery = Nursery()
    return _nursery.start(argv, env, log)


def _preload() -> None:
    """Import what a server imports, with the environment that it would prepare for that."""
    from prime_rl.configs.inference import InferenceConfig
    from prime_rl.inference.arguments import prepare_environment

    prepare_environment(InferenceConfig(), on_cpu=True)
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import prime_rl.inference.server  # noqa: F401

    gc.collect()
    gc.freeze()


def _fork_on_request() -> dict[str, Any] | None:
    """Fork a child for each request, and tell how each ends; in a child return its request, at the end None."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed here is no answer
    waiting = selectors.DefaultSelector()
    waiting.register(sys.stdin.buffer, selectors.EVENT_READ, None)
    while True:
        for key, _ in waiting.select():
            if key.data is None:
                line = sys.stdin.buffer.readline()
                if not line:
                    return None
                pid = os.fork()
                if pid == 0:
                    waiting.close()
                    return dict(json.loads(line))
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                told = {"pid": pid}
            else:
                _, status = os.waitpid(key.data, 0)
                waiting.unregister(key.fileobj)
                os.close(key.fd)
                told = {"pid": key.data, "code": os.waitstatus_to_exitcode(status)}
            print(json.dumps(told), file=answers, flush=True)


def _serve(request: dict[str, Any]) -> None:
    from prime_rl.entrypoints.inference import main
    from prime_rl.supervisor.process import follow_parent

    follow_parent()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(source, descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["inference", *request["argv"]]
    main()


if __name__ == "__main__":
    _preload()
    if (mine := _fork_on_request()) is not None:
        _serve(mine)
