"""Writes the heartbeat of this process, which `heartbeat_monitor` reads (I7), and its finished phases."""

import json
import os
import re
import socket
import sys
import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from prime_rl.core.entry_point import write_error_file
from prime_rl.core.errors import ConfigError, RunError, summarize_exception
from prime_rl.core.logs import append_to_log_file, log_path
from prime_rl.core.terminal_escape import replace_surrogates
from prime_rl.liveness.heartbeat_monitor import (
    ENDED,
    FAILED,
    FORMAT,
    IMPORT,
    NODE,
    HeartbeatRecord,
    boot_id,
    read_heartbeat,
    read_heartbeats,
    read_process_stat,
)
from prime_rl.liveness.run_settings import RunSettings
from prime_rl.liveness.timeline_writer import TimelineWriter
from prime_rl.storage.artifact import replace_file
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import START_VARIABLE

TAKEOVER_SECONDS = 5.0
"""Time in which processes of an earlier start notice a takeover: the longest interval of heartbeats and two seconds."""

_NUMBER = re.compile(r" \d+$")


class HeartbeatWriter:
    """Writes the heartbeat file `name` once a second, in a background thread, from `start` to `close`.

    The thread also ends this process when another start takes over the run (`RunTakeover`).

    As a context manager it calls `start`, and `close` with `failed` if an exception passes, otherwise with `ended`.
    `enter` and `advance` may be called from any thread and do no I/O.

    Attributes:
        timeline: gets every phase when it ends.
        is_started: `start` was called; without it, nothing is written.
        silent_hosts: seconds since the last message of hosts from which this process expects messages.
    """

    def __init__(
        self,
        paths: RunPaths,
        name: str,
        role: str,
        interval_seconds: float = 1.0,
        settings: RunSettings = MappingProxyType({}),
    ) -> None:
        self._path = paths.heartbeat(name)
        self._interval_seconds = interval_seconds
        self._identity: dict[str, Any] = {
            "name": name, "role": role, "pid": os.getpid(), "host": socket.gethostname(), "boot_id": boot_id(),
            "started": read_process_stat(os.getpid())[1], "log": log_path(), "settings": dict(settings),
        }  # fmt: skip
        self.timeline = TimelineWriter(paths, name, interval_seconds)
        self._takeover = RunTakeover(paths)
        self._paths, self._parts = paths, dict[str, TimelineWriter]()
        self._phase: tuple[str, float | None, str | None, float] = ("start", None, None, time.time())
        self._place: tuple[int | None, int | None] = (None, None)
        """Step and version of the phase."""
        self.is_started = False
        self.silent_hosts: Mapping[str, float] = {}
        self._progress = self._num_beats = 0
        self._loop: AbstractEventLoop | None = None
        self._loop_responded = threading.Event()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first heartbeat and start the background thread. A failed write is not an error.

        The last phase of an earlier process of this name that was killed is added to the timeline.
        """
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        if (earlier := read_heartbeat(self._path)) is not None:
            _add_interrupted_phase(self.timeline, earlier)
        self._write()
        self.is_started = True
        self._thread.start()

    def enter(
        self,
        phase: str,
        deadline_seconds: float | None = None,
        waiting_for: str | None = None,
        *,
        step: int | None = None,
        version: int | None = None,
    ) -> None:
        """Set the phase of this process and count it as progress. Entering the same phase again has no effect.

        Args:
            phase: description such as "wait for batch 12"; the timeline omits the number at its end.
            deadline_seconds: time without progress after which the process counts as stuck.
            waiting_for: role that the process waits for.
            step: of the phase, for the timeline.
            version: policy version of the phase, for the timeline.
        """
        with self._lock:
            if self._phase[:3] == (phase, deadline_seconds, waiting_for):
                return
            ended, place, now = self._phase, self._place, time.time()
            self._phase, self._place = (phase, deadline_seconds, waiting_for, now), (step, version)
            self._progress += 1
        if self.is_started:
            name, ended_waiting_for, since = _NUMBER.sub("", ended[0]), ended[2], ended[3]
            self.timeline.add(name, since, now, waiting_for=ended_waiting_for, step=place[0], version=place[1])

    def enter_imports(self, packages: str) -> None:
        """Set the first phase, "import <packages>", which lasts since the start of the process."""
        ticks = self._identity["started"]
        seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0
        now = time.time()
        with self._lock:
            self._phase = (f"{IMPORT} {packages}", None, None, now - seconds)

    def add_settings(self, settings: RunSettings) -> None:
        """Add settings that were unknown at the start."""
        self._identity["settings"] = {**self._identity["settings"], **settings}

    def interrupt(self, phase: str, start: float, version: int) -> None:
        """Record a phase that has interrupted the present one since `start` (Unix seconds) and ends now.

        The present phase continues, from now on with this version.
        """
        with self._lock:
            (present, deadline_seconds, waiting_for, since), place, now = self._phase, self._place, time.time()
            self._phase, self._place = (present, deadline_seconds, waiting_for, now), (place[0], version)
        if self.is_started:
            name = _NUMBER.sub("", present)
            self.timeline.add(name, since, start, waiting_for=waiting_for, step=place[0], version=place[1])
            self.timeline.add(phase, start, now, version=version)

    def part(self, name: str) -> TimelineWriter:
        """The timeline `<process>_<name>`, for phases that overlap those of the process; `close` closes it."""
        if name not in self._parts:
            timeline = TimelineWriter(self._paths, f"{self._identity['name']}_{name}", self._interval_seconds)
            self._parts[name] = timeline
        return self._parts[name]

    def advance(self, units: int = 1) -> None:
        """Increase `progress` in the heartbeat by the completed units of work."""
        with self._lock:
            self._progress += units

    def report_silent_hosts(self, seconds: Mapping[str, float]) -> None:
        """Add the hosts that send nothing to this process to its heartbeat, with the seconds of silence."""
        self.silent_hosts = {host: round(value, 1) for host, value in seconds.items()}

    def watch_event_loop(self, loop: AbstractEventLoop | None) -> None:
        """Pause the heartbeat while `loop` is blocked; None ends this."""
        self._loop_responded.set()
        self._loop = loop

    def close(self, last_phase: str = ENDED) -> None:
        """Write the final heartbeat, `ended` or `failed`. Later calls have no effect."""
        if self._closed.is_set() or os.getpid() != self._identity["pid"]:  # a forked child must not close it
            return
        self._closed.set()
        self.watch_event_loop(None)
        if self._thread.is_alive():
            self._thread.join(10 * self._interval_seconds)
        self.enter(last_phase)
        self._write()
        for timeline in (self.timeline, *self._parts.values()):
            timeline.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Write `failed` after an Exception; KeyboardInterrupt, SystemExit and cancellation count as `ended`."""
        if isinstance(error, Exception):
            is_expected = isinstance(error, ConfigError | RunError)
            line = str(error) if is_expected else summarize_exception(error, full=True)
            self._identity["error"] = " ".join(line.split())
        self.close(FAILED if isinstance(error, Exception) else ENDED)

    def _run(self) -> None:
        while not self._closed.wait(self._interval_seconds):
            self._takeover.exit_if_taken()
            if self._check_event_loop():
                self._write()

    def _check_event_loop(self) -> bool:
        """Return whether the loop has responded since the last call, and send it the next probe."""
        loop, responded = self._loop, self._loop_responded.is_set()
        if loop is not None and responded:
            self._loop_responded.clear()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._loop_responded.set)
        return loop is None or responded

    def _write(self) -> None:
        with self._lock:
            self._num_beats += 1
            phase, deadline_seconds, waiting_for, since = self._phase
            state = {
                "beat": self._num_beats, "phase": phase, "progress": self._progress,
                "phase_deadline_s": deadline_seconds, "phase_since": since, "waiting_for": waiting_for,
                "written": time.time(), "silent_hosts": dict(self.silent_hosts),
            }  # fmt: skip
        _write_record(self._path, {**self._identity, **state})


class NodeHeartbeat:
    """The heartbeat of a node, written by the process that hears from it (`supervisor.nodes.node_launcher`)."""

    def __init__(self, paths: RunPaths, node: str, role: str) -> None:
        """Remove the file of an earlier start. `role` is that of the child process of `rl` that uses the node."""
        name = f"{NODE}_{node}" if role == "trainer" else f"{NODE}_{node}_server"  # a node may have both roles
        self._path = paths.heartbeat(name)
        self._identity = {
            "name": name, "role": role, "host": node, "boot_id": "", "started": 0, "log": "",
            "phase": "answer to rl", "phase_deadline_s": None, "phase_since": time.time(), "waiting_for": None,
        }  # fmt: skip
        self._num_beats = 0
        self.remove()

    def write(self, pid: int) -> None:
        """Write a heartbeat of the node's process `pid`. A failed write is not an error."""
        self._num_beats += 1
        number = {"beat": self._num_beats, "progress": self._num_beats}
        _write_record(self._path, {**self._identity, **number, "pid": pid, "written": time.time()})

    def remove(self) -> None:
        """Remove the heartbeat file; errors are ignored."""
        with suppress(OSError):  # it is only misleading
            self._path.unlink(missing_ok=True)


def _write_record(path: Path, fields: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(exist_ok=True)  # without parents: nothing recreates a run that the user has removed
        temporary.write_text(json.dumps(replace_surrogates({"format": FORMAT, **fields})))
        temporary.replace(path)
    except OSError:  # on a full disk, touching the file still works and shows that this process is alive
        with suppress(OSError):
            os.utime(path)


def record_interrupted_phases(paths: RunPaths) -> None:
    """Add the last phases of the processes of an earlier start, which were killed, to their timelines.

    Call it before their heartbeats are removed. A run directory without a timeline gets none.
    """
    if paths.timeline_dir.is_dir():
        for name, beat in read_heartbeats(paths).items():
            timeline = TimelineWriter(paths, name)
            _add_interrupted_phase(timeline, beat)
            timeline.close()


def _add_interrupted_phase(timeline: TimelineWriter, beat: HeartbeatRecord) -> None:
    if beat.phase not in (ENDED, FAILED):
        name = _NUMBER.sub("", beat.phase)
        timeline.add(name, beat.phase_since, beat.written, waiting_for=beat.waiting_for)


def take_over(paths: RunPaths) -> None:
    """Record that the run belongs to the start of this process, and wait until earlier ones have ended (I3).

    A scheduler may start a job again while processes of its first start are still running, on a node that it cannot
    reach. They would write the same batches, versions and checkpoints. Starts have names (`START_VARIABLE`), and the
    one that resumes writes its name to a file, before it touches anything else. Processes without a name, which a user
    has started, do not take part: they lock the directory (`hold_role_lock`).
    """
    if name := os.environ.get(START_VARIABLE):
        replace_file(paths.owner, name)
        time.sleep(TAKEOVER_SECONDS)  # a process that cannot be reached cannot confirm its end


class RunTakeover:
    """Detects that another start has taken over the run since this object was created."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths, self._start = paths, os.environ.get(START_VARIABLE)
        self._owner = self._read()

    def new_owner(self) -> str | None:
        """Return the name of the start that has taken over the run; None if there is none."""
        owner = self._read()
        return owner if self._start and owner not in (None, self._owner, self._start) else None

    def exit_if_taken(self) -> None:
        """End this process at once if another start has taken over: its next write could already do damage."""
        if (owner := self.new_owner()) is None:
            return
        message = f"{self._paths.root} was taken over by start {owner}; this process (start {self._start}) exits"
        print(f"error: {message}", file=sys.stderr, flush=True)
        append_to_log_file(f"error: {message}")
        write_error_file(message, 2)
        os._exit(2)

    def _read(self) -> str | None:
        try:
            return self._paths.owner.read_text()
        except OSError:  # also of a file system that does not answer for a moment
            return None
