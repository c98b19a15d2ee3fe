"""Reads the heartbeats of a run and reports which processes are alive, silent, stopped, stuck or dead (I7).

heartbeats/<name>.json    one file per process, replaced atomically every second

alive <--> silent --> dead        silent: no heartbeat for `warn_after_seconds`
  |  \\       |                    stopped: silent, and the process is stopped (SIGSTOP, Ctrl-Z)
  |   \\      +--> stopped         dead: no heartbeat for `dead_after_seconds`, failed, or exited
  |    +--> stuck                 stuck: heartbeats arrive, but a phase exceeds its deadline
  +--> ended                      ended: regular exit, reported by the final heartbeat
  +--> unreachable                unreachable: its host sends nothing to another process of the role
"""

import math
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter
from pathlib import Path

import msgspec

from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.run_settings import Setting
from prime_rl.storage.paths import RunPaths

FORMAT = "prime_rl.heartbeat/1"
ENDED = "ended"
"""Final phase of a process that exited regularly."""
FAILED = "failed"
"""Final phase of a process that an exception ended."""
NODE = "node"
"""First part of the names of nodes on which `rl` runs a command over the network, such as `node_host7`."""
SERVING = "serve"
"""Phase of a server that answers requests. Its engines have allocated all the memory that they need."""
IMPORT = "import"
"""First word of the phase of a process that imports its packages."""
WAIT_FOR_SLOT = "wait for a slot"
"""First words of the phase of such a trainer for a run that waits until another one leaves."""
ENGINE = "engine"
"""Role of an engine of an inference server, which has a heartbeat while it starts."""
_START_PATIENCE = 10.0
"""A process may be silent for longer by this factor while it imports or loads: a slow disk blocks its threads."""
_MIN_STEP_SECONDS, _MAX_STEP_SECONDS = 1.2, 2.0
_PROGRESS = attrgetter("boot_id", "pid", "started", "phase", "progress")


@dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """The contents of one heartbeat file.

    Attributes:
        name: name of the process and stem of its file: `trainer_0`, `orchestrator`, `inference`.
        boot_id: identifies the node's kernel start and process namespace; equal values make `pid` comparable.
        started: start time of the process in the kernel's clock; distinguishes processes that reuse a pid.
        beat: number of heartbeats written so far.
        progress: increases with each unit of work.
        phase_deadline_s: longest time without progress in this phase; None sets no limit.
        phase_since, written: Unix seconds of the writer's clock; only displayed.
        waiting_for: role that the process waits for, if any.
        log: path of its log; "" for a terminal.
        settings: those that the processes of a run must share (`run_settings`).
        silent_hosts: hosts that send nothing to this process although they should, with the seconds of silence.
        error: that ended the process, on one line.
        touched: modification time of the file in nanoseconds. It also changes when a full disk prevents the rest from
            being written.
    """

    name: str
    role: str
    pid: int
    host: str
    boot_id: str
    started: int
    beat: int
    phase: str
    progress: int
    phase_deadline_s: float | None
    phase_since: float
    waiting_for: str | None
    log: str
    written: float
    touched: int = 0
    format: str = FORMAT
    settings: Mapping[str, Setting] = field(default_factory=dict)
    silent_hosts: Mapping[str, float] = field(default_factory=dict)
    error: str = ""

    def __str__(self) -> str:
        """Return e.g. `trainer_0 (pid 12 on node7)`."""
        return f"{self.name} (pid {self.pid} on {self.host})"


class KernelState(StrEnum):
    """State of a process according to the kernel."""

    RUNNING = "running"
    STOPPED = "stopped"
    TRACED = "traced"
    GONE = "gone"
    UNKNOWN = "unknown"
    """The process is on another node, or /proc is not available."""


class ProcessState(StrEnum):
    """State of a process according to its heartbeats and the kernel."""

    ALIVE = "alive"
    SILENT = "silent"
    STOPPED = "stopped"
    STUCK = "stuck"
    UNREACHABLE = "unreachable"
    DEAD = "dead"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LivenessReport:
    """State of one process at one poll.

    Attributes:
        duration_seconds: time without a heartbeat, or without progress, by the reader's clock.
        seen_alive: this reader has seen the process alive. Otherwise the file may belong to an earlier run.
        description: the state in words, without the name.
    """

    name: str
    state: ProcessState
    heartbeat: HeartbeatRecord
    duration_seconds: float
    kernel_state: KernelState
    seen_alive: bool
    description: str = ""

    @property
    def is_local(self) -> bool:
        """Whether the process runs on this host and in this container, so that its process id is valid here."""
        return self.kernel_state not in (KernelState.UNKNOWN, KernelState.GONE)

    @property
    def has_exited(self) -> bool:
        """Whether the process has written its final heartbeat."""
        return self.heartbeat.phase in (ENDED, FAILED)

    def is_lost(self, dead_after_seconds: float) -> bool:
        """Whether the process has ended or is dead, or has been stopped for so long."""
        if self.state is ProcessState.STOPPED:
            return self.duration_seconds > dead_after_seconds
        return self.state in (ProcessState.DEAD, ProcessState.ENDED)

    def __str__(self) -> str:
        """Return one line: process, state and duration, phase, log."""
        log = f", log {self.heartbeat.log}" if self.heartbeat.log else ""
        return f"{self.heartbeat} {self.description}; phase {self.heartbeat.phase!r}{log}"


class LivenessTracker:
    """Derives the state of one process from its successive heartbeats. Has no side effects."""

    def __init__(self, name: str, limits: HeartbeatLimits) -> None:
        self._name, self._limits = name, limits
        # Time between two calls counts up to this limit: a reader that was itself stopped or swapped out must not
        # count that time against the process. Times in the file are not used: clocks of nodes differ, and jump.
        self._max_step_seconds = min(_MAX_STEP_SECONDS, max(limits.warn_after_seconds / 2, _MIN_STEP_SECONDS))
        self._last_call = math.inf
        self._last: HeartbeatRecord | None = None
        self._silent_seconds = self._idle_seconds = 0.0
        self._seen_alive = False

    def observe(
        self, beat: HeartbeatRecord | None, now: float, kernel_state: KernelState = KernelState.UNKNOWN
    ) -> LivenessReport:
        """Return the state after one more reading, about once a second; `now` is the reader's monotonic clock.

        A later `beat` is None if the file is missing or unreadable. `kernel_state` is read after the file.
        """
        passed = min(max(0.0, now - self._last_call), self._max_step_seconds)
        self._last_call, last = now, self._last
        self._last = beat = beat or last
        assert beat is not None
        self._silent_seconds = self._silent_seconds + passed if beat == last else 0.0
        has_progress = last is None or _PROGRESS(beat) != _PROGRESS(last)
        self._idle_seconds = 0.0 if has_progress else self._idle_seconds + passed
        exists = kernel_state not in (KernelState.GONE, KernelState.UNKNOWN)
        self._seen_alive |= exists or (last is not None and beat != last)
        # The process may have written its final heartbeat after the file was read: wait for the next call.
        gone = kernel_state is KernelState.GONE and beat == last
        state, duration, description = self._classify(beat, gone, kernel_state)
        return LivenessReport(self._name, state, beat, duration, kernel_state, self._seen_alive, description)

    def _classify(
        self, beat: HeartbeatRecord, gone: bool, kernel_state: KernelState
    ) -> tuple[ProcessState, float, str]:
        silent, idle, limits = self._silent_seconds, self._idle_seconds, self._limits
        deadline, no_heartbeat = beat.phase_deadline_s, f"has written no heartbeat for {silent:.0f} s"
        if beat.phase == ENDED:
            return ProcessState.ENDED, silent, "has ended"
        if beat.phase == FAILED:
            return ProcessState.DEAD, silent, "has failed"
        if gone:
            return ProcessState.DEAD, silent, "is gone: its process no longer exists"
        if silent > limits.warn_after_seconds and kernel_state is KernelState.STOPPED:
            return ProcessState.STOPPED, silent, f"is stopped (SIGSTOP?) and {no_heartbeat}"
        patience = _START_PATIENCE if beat.phase.startswith(IMPORT) or beat.role == ENGINE else 1.0
        if silent > patience * limits.dead_after_seconds:
            return ProcessState.DEAD, silent, no_heartbeat
        if silent > patience * limits.warn_after_seconds:
            return ProcessState.SILENT, silent, no_heartbeat
        if deadline is not None and idle > deadline + limits.warn_after_seconds:
            return ProcessState.STUCK, idle, f"is stuck: no progress for {idle:.0f} s (limit {deadline:g} s)"
        return ProcessState.ALIVE, idle, "is alive"


class HeartbeatMonitor:
    """Polls the heartbeat files of a run, of some roles or of all, with one `LivenessTracker` per file."""

    def __init__(
        self,
        paths: RunPaths,
        limits: HeartbeatLimits,
        roles: tuple[str, ...] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths, self._limits, self._roles, self._clock = paths, limits, roles, clock
        self._trackers: dict[str, LivenessTracker] = {}

    def poll(self) -> list[LivenessReport]:
        """Read all files and return one report per process, sorted by name."""
        beats = read_heartbeats(self._paths, self._roles)
        for name in beats:
            self._trackers.setdefault(name, LivenessTracker(name, self._limits))
        existing = [path.stem for path in _files(self._paths, None)]
        for name in [name for name in self._trackers if name not in beats and existing and name not in existing]:
            del self._trackers[name]  # a restart with fewer ranks has removed the file
        now = self._clock()
        states = {name: read_kernel_state(beat) for name, beat in beats.items()}
        reports = [
            tracker.observe(beats.get(name), now, states.get(name, KernelState.UNKNOWN))
            for name, tracker in sorted(self._trackers.items())
        ]
        return _mark_unreachable(reports)

    def forget(self, names: Collection[str]) -> None:
        """Count these processes as unseen until their next heartbeat: they have been started again."""
        for name in names:
            self._trackers.pop(name, None)


def _mark_unreachable(reports: list[LivenessReport]) -> list[LivenessReport]:
    """Mark the living processes on hosts that send nothing to another living process of their role."""
    lost = {
        (report.heartbeat.role, host): f"sends nothing to {report.name} on {report.heartbeat.host} for {seconds:.0f} s"
        for report in reports
        if report.state in (ProcessState.ALIVE, ProcessState.STUCK)
        for host, seconds in report.heartbeat.silent_hosts.items()
    }

    def mark(report: LivenessReport) -> LivenessReport:
        description = lost.get((report.heartbeat.role, report.heartbeat.host))
        is_node = report.name.startswith(f"{NODE}_")  # it has answered `rl`, and sends nothing to others
        if description is None or is_node or report.state is not ProcessState.ALIVE:
            return report
        return replace(report, state=ProcessState.UNREACHABLE, description=description)

    return list(map(mark, reports))


def remove_heartbeats(paths: RunPaths, role: str, keep: Collection[str]) -> None:
    """Remove the files of other processes of `role`, e.g. of the ranks of an earlier, larger trainer."""
    for beat in read_heartbeats(paths, (role,)).values():
        if beat.name not in keep:
            with suppress(OSError):  # the file is only misleading
                paths.heartbeat(beat.name).unlink()


def read_heartbeats(paths: RunPaths, roles: tuple[str, ...] | None = None) -> dict[str, HeartbeatRecord]:
    """Return the readable heartbeats by name, of some roles or of all."""
    read = [read_heartbeat(path) for path in _files(paths, roles)]
    return {beat.name: beat for beat in read if beat is not None}


def _files(paths: RunPaths, roles: tuple[str, ...] | None) -> list[Path]:
    """List the heartbeat files. The first part of a file's name is the role, so other files need not be read."""
    with suppress(OSError):  # the folder does not exist yet, or a network file system fails temporarily
        files = sorted(path for path in paths.heartbeats_dir.iterdir() if path.suffix == ".json")
        return [path for path in files if roles is None or path.stem.split("_")[0] in roles]
    return []


def read_heartbeat(path: Path) -> HeartbeatRecord | None:
    """Read one heartbeat; None if the file is missing, unreadable, malformed, or a copy under another name."""
    with suppress(OSError, msgspec.MsgspecError):
        beat = msgspec.json.decode(path.read_bytes(), type=HeartbeatRecord)
        if beat.format == FORMAT and beat.name == path.stem:
            return replace(beat, touched=path.stat().st_mtime_ns)
    return None


def read_kernel_state(beat: HeartbeatRecord) -> KernelState:
    """Return the kernel's state of the process that wrote `beat`; UNKNOWN if it is on another node."""
    if not beat.boot_id or beat.boot_id != boot_id() or beat.host != socket.gethostname():
        return KernelState.UNKNOWN
    letter, started = read_process_stat(beat.pid)
    if letter in ("", "Z", "X") or started != beat.started:
        return KernelState.GONE
    return {"T": KernelState.STOPPED, "t": KernelState.TRACED}.get(letter, KernelState.RUNNING)


def boot_id() -> str:
    """Return an identifier of this kernel start and process namespace; "" without /proc."""
    with suppress(OSError):
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel}/{Path('/proc/self/ns/pid').stat().st_ino}"
    return ""


def read_process_stat(pid: int) -> tuple[str, int]:
    """Return the kernel's state letter of a process and its start time in ticks since boot; ("", 0) if it is gone."""
    with suppress(OSError):
        # The process name in parentheses may contain anything.
        after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return after[0], int(after[19])
    return "", 0
