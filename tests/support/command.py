"""Installed commands as separate processes, as a user starts them."""

import json
import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from prime_rl.storage.paths import RunPaths

PROGRESS_TIMEOUT_SECONDS = 240
"""Time limit of a start or of a few steps on a heavily loaded machine; they take seconds on an idle one."""

RUN_TIMEOUT_SECONDS = 500
"""Time limit of a whole small run on a heavily loaded machine; it takes up to a minute on an idle one."""

END_TIMEOUT_SECONDS = 45
"""Time limit from a signal, or the death of a process, to the exit of all processes on a heavily loaded machine.

It takes seconds on an idle one. Below `heartbeat.dead_after_seconds` (60), so that a process which has died is noticed
for its death and not for its silence."""


MODULES = {
    "inference": "prime_rl.entrypoints.inference",
    "orchestrator": "prime_rl.entrypoints.orchestrator",
    "trainer": "prime_rl.trainer.torchrun",
    "page": "prime_rl_page",
}


def executable(name: str) -> str:
    """Return the path of an installed command."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def clean_environment() -> dict[str, str]:
    """Return the environment without variables that configure a run or disable bytecode."""
    dropped = ("PRIME_", "OUTPUT_DIR", "INFERENCE_SERVER_IP", "DATA_PARALLEL_", "PYTHONDONTWRITE", "FORCE_COLOR")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    return {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PRIME_RL_STRICT_METRICS": "1"}


def offspring() -> dict[int, psutil.Process]:
    """Return all live descendants of this process by process id.

    Includes orphans if this process is a subreaper (`become_subreaper`).
    """
    return {process.pid: process for process in psutil.Process().children(recursive=True) if alive(process)}


def children_of(process: psutil.Process) -> list[psutil.Process]:
    """Return the descendants of a process; [] if it has ended."""
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(process: psutil.Process) -> bool:
    """Return whether the process runs and is no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool], what: str, timeout_seconds: float = PROGRESS_TIMEOUT_SECONDS) -> None:
    """Poll until `condition` holds.

    Raises:
        AssertionError: it does not within `timeout_seconds` seconds; the message contains `what`.
    """
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_seconds:.0f} s for {what}"
        time.sleep(0.02)


def json_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file that a process may be writing, without an incomplete last line; [] without it."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def metrics_of(paths: RunPaths, role: str) -> list[dict[str, Any]]:
    """Return the reported steps of `role`."""
    return json_lines(paths.metrics(role))


class Command:
    """A running command.

    Attributes:
        process: its process.
        paths: paths of its run directory.
    """

    def __init__(self, name: str, arguments: list[str], output_dir: Path) -> None:
        """Start `name`; write its output to files next to `output_dir`, which `arguments` must also contain."""
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
        """The output on stdout."""
        return self._out.read_text()

    @property
    def errors(self) -> str:
        """The output on stderr."""
        return self._err.read_text()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll until `condition` holds; fail immediately if the command exits before."""

        def holds() -> bool:
            ended = self.process.poll() is not None  # read first, because work before the exit counts
            if condition():
                return True
            assert not ended, f"{self.name} ended with {self.process.returncode} before {what}:\n{self.story()}"
            return False

        until(holds, f"{what} of {self.name}")

    def until_step(self, role: str, step: int) -> None:
        """Wait until `role` has reported `step`."""
        self.until(lambda: len(metrics_of(self.paths, role)) > step, f"step {step} of the {role}")

    def role(self, name: str) -> psutil.Process:
        """Return the process of a role, a child of `rl`."""
        [process] = [c for c in psutil.Process(self.process.pid).children() if _is(c, MODULES[name])]
        return process

    def engines(self) -> list[psutil.Process]:
        """Return the engine processes of the server of `rl`."""
        return self.role("inference").children()

    def ranks(self) -> list[psutil.Process]:
        """Return the trainer ranks of `rl`."""
        return [c for c in self.role("trainer").children() if _is(c, "prime_rl.trainer.rl.train")]

    def end(self, timeout_seconds: float = RUN_TIMEOUT_SECONDS, beside: "Command | None" = None) -> int:
        """Wait for the exit and return the exit code; fail if processes are left.

        Args:
            timeout_seconds: time limit.
            beside: another command that was started later and still runs.
        """
        try:
            code = self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {timeout_seconds:.0f} s:\n{self.story()}") from None
        left = self.started()
        if beside is not None:
            other = psutil.Process(beside.process.pid)
            theirs = {other.pid, *(p.pid for p in children_of(other))}  # read last: `beside` starts and ends processes
            left = [p for p in left if p.pid not in theirs and alive(p)]
        assert not left, f"{self.name} left {left}"
        return code

    def started(self) -> list[psutil.Process]:
        """Return live descendants of this process that did not exist when the command started.

        Those of older processes do not count: a browser starts a process for each tab.
        """
        found = offspring()
        older = [process for pid, process in found.items() if pid in self._before]
        theirs = {child.pid for process in older for child in children_of(process)}
        return [process for pid, process in found.items() if pid not in self._before | theirs]

    def clean_up(self) -> None:
        """Kill the remaining processes after a failed test."""
        self.process.poll()
        for process in self.started():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait()

    def story(self) -> str:
        """Return the end of all logs, for the message of a failed test."""
        logs = sorted(self.paths.logs_dir.glob("*.log")) if self.paths.logs_dir.is_dir() else []
        return "\n".join(f"--- {file}\n{file.read_text()[-3000:]}" for file in (self._out, self._err, *logs))


def _is(process: psutil.Process, module: str) -> bool:
    try:
        return module in process.cmdline()
    except psutil.Error:
        return False
