"""The installed commands in processes of their own, as a user starts them, and what becomes of them."""

import json
import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from prime_rl.run.paths import RunPaths

PROGRESS_TIMEOUT_S = 240
"""For a start, or a few steps, on a machine that others load heavily; seconds on a quiet one."""

END_TIMEOUT_S = 15
"""What the documentation promises from a signal, or the death of a process, to the end of all of them."""


MODULES = {
    "inference": "prime_rl.entrypoints.inference",
    "orchestrator": "prime_rl.entrypoints.orchestrator",
    "trainer": "prime_rl.trainer.launch",
}


def executable(name: str) -> str:
    """Where the installed command is."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def clean_environment() -> dict[str, str]:
    """This environment without what would configure a run, or have thousands of files compiled at each start."""
    dropped = ("PRIME_", "OUTPUT_DIR", "INFERENCE_SERVER_IP", "DATA_PARALLEL_", "PYTHONDONTWRITE", "FORCE_COLOR")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    return {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def offspring() -> dict[int, psutil.Process]:
    """All processes that descend from this one and are not dead, by process id.

    Complete if this process is a subreaper (`prime_rl.supervisor.process.become_subreaper`): then orphans are its own.
    """
    return {process.pid: process for process in psutil.Process().children(recursive=True) if alive(process)}


def alive(process: psutil.Process) -> bool:
    """Whether it has not ended; a zombie, which only waits to be asked how, has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool], what: str, timeout_s: float = PROGRESS_TIMEOUT_S) -> None:
    """Ask until `condition` holds.

    Raises:
        AssertionError: it did not within `timeout_s` seconds; names `what`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.02)


def metrics_of(paths: RunPaths, role: str) -> list[dict[str, Any]]:
    """The steps that `role` has reported; a line that is still being written is left out."""
    file = paths.metrics(role)
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Command:
    """A command that runs.

    Attributes:
        process: its process.
        paths: the run directory that it was given.
    """

    def __init__(self, name: str, arguments: list[str], output_dir: Path) -> None:
        """Start `name` with its output in files beside `output_dir`, which it is not told of here."""
        self.name, self.paths = name, RunPaths(output_dir)
        self._before = set(offspring())
        stem = output_dir.parent / f"{output_dir.name}-{name}"
        self._out, self._err = stem.with_suffix(".out"), stem.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [executable(name), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=clean_environment(),
            )

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._out.read_text()

    @property
    def errors(self) -> str:
        """What it has printed on stderr."""
        return self._err.read_text()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Ask until `condition` holds; fails at once if the command ends before."""

        def holds() -> bool:
            ended = self.process.poll() is not None  # asked first: what it did before its end counts
            if condition():
                return True
            assert not ended, f"{self.name} ended with {self.process.returncode} before {what}:\n{self.story()}"
            return False

        until(holds, f"{what} of {self.name}")

    def until_step(self, role: str, step: int) -> None:
        """Wait until `role` has reported `step`."""
        self.until(lambda: len(metrics_of(self.paths, role)) > step, f"step {step} of the {role}")

    def role(self, name: str) -> psutil.Process:
        """The process of a role, a child of `rl`."""
        [process] = [c for c in psutil.Process(self.process.pid).children() if _is(c, MODULES[name])]
        return process

    def engines(self) -> list[psutil.Process]:
        """The engine processes of the server that `rl` has started."""
        return self.role("inference").children()

    def ranks(self) -> list[psutil.Process]:
        """The ranks of the trainer that `rl` has started."""
        return [c for c in self.role("trainer").children() if _is(c, "prime_rl.trainer.rl.train")]

    def end(self, timeout_s: float = PROGRESS_TIMEOUT_S, beside: "Command | None" = None) -> int:
        """Wait for its end and return the exit code; nothing that it started may be left.

        Args:
            timeout_s: how long it may take.
            beside: another that was started later and still runs.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {timeout_s:.0f} s:\n{self.story()}") from None
        others = {p.pid for p in psutil.Process(beside.process.pid).children(recursive=True)} if beside else set()
        left = [p for p in self.started() if beside is None or p.pid not in others | {beside.process.pid}]
        assert not left, f"{self.name} left {left}"
        return code

    def started(self) -> list[psutil.Process]:
        """Every live process that descends from this one and was not there when the command started."""
        return [process for pid, process in offspring().items() if pid not in self._before]

    def clean_up(self) -> None:
        """Kill what is left of it, after a test that failed."""
        self.process.poll()
        for process in self.started():
            process.send_signal(signal.SIGKILL)
        self.process.wait()

    def story(self) -> str:
        """What it and the processes of its run said last, for the message of a failed test."""
        logs = sorted(self.paths.logs_dir.glob("*.log")) if self.paths.logs_dir.is_dir() else []
        return "\n".join(f"--- {file}\n{file.read_text()[-3000:]}" for file in (self._out, self._err, *logs))


def _is(process: psutil.Process, module: str) -> bool:
    try:
        return module in process.cmdline()
    except psutil.Error:
        return False
