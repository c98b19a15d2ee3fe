"""I7 no hang: each process says once a second that it lives, and what it does or waits for; whoever asks can tell.

    heartbeats/<name>.json    replaced as a whole, so that no reader sees half of it (I4)

A reader judges by its own clock since the contents last changed, never by times in the file: clocks of nodes differ,
and jump. Time that the reader itself has slept (stopped, swapped out) is counted against nobody.

    absent --> alive <--> silent --> dead        silent: nothing new for `silence_s`
                 |  \\       |                    stopped: silent, and its process is (SIGSTOP, Ctrl-Z)
                 |   \\      +--> stopped         dead: silent for `timeout_s`; failed; or the process is gone
                 |    +--> stuck                 stuck: beats, but has been in one phase for longer than it may
                 +--> ended                      ended: in order; its last word

A machine under load that starves a process for six seconds makes it silent, which is reported and ends nothing.
"""

import json
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path

from prime_rl.run.paths import RunPaths

FORMAT = "prime_rl.heartbeat/1"
ENDED = "ended"
"""Last phase of a process that ended in order."""
FAILED = "failed"
"""Last phase of a process that an exception ended."""
_LOOK_AT_LEAST_S, _LOOK_AT_MOST_S = 1.2, 2.0


@dataclass(frozen=True, slots=True)
class Beat:
    """What a process last said.

    Attributes:
        name: of the process, and of its file: `trainer_0`, `orchestrator`, `inference`.
        role: `trainer`, `orchestrator` or `inference`.
        pid: its process id, on `host`.
        host: name of its node.
        boot_id: of the node's kernel and process namespace: where it is equal, `pid` means the same process.
        started: when the process began, in the kernel's clock; tells it from another one of the same pid.
        beat: rises with each beat.
        phase: what it does, for people.
        progress: rises with each unit of work.
        phase_deadline_s: longest time without progress in this phase; None sets no limit.
        phase_since: when it entered the phase, Unix seconds by its own clock; for people.
        waiting_for: the role that it waits for, if it does.
        log: its log; "" if that is a terminal.
        written: Unix seconds by its own clock; for people.
        touched: of the file, nanoseconds; changes too where a full disk has kept the rest from being written.
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

    def __str__(self) -> str:
        """Who it is: `trainer_0 (pid 12 on node7)`."""
        return f"{self.name} (pid {self.pid} on {self.host})"


class Life(StrEnum):
    """What the kernel says of a process."""

    RUNNING = "running"
    STOPPED = "stopped"
    TRACED = "traced"
    GONE = "gone"
    UNKNOWN = "unknown"
    """It is on another node, or the kernel does not say."""


class State(StrEnum):
    """What is to be thought of a process."""

    ABSENT = "absent"
    ALIVE = "alive"
    SILENT = "silent"
    STOPPED = "stopped"
    STUCK = "stuck"
    DEAD = "dead"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Limits:
    """When a process is silent, and when dead, seconds; `[heartbeat]` in the configuration."""

    silence_s: float = 5.0
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one look at a process's heartbeat tells.

    Attributes:
        name: of the process.
        state: what is to be thought of it.
        beat: what it last said; None if absent.
        for_s: seconds, by the reader's clock, that it has been silent, or without progress.
        life: what the kernel says of the process.
        seen: this reader has seen the process live; if not, the file may be of an earlier run.
        why: the state in words, without who.
    """

    name: str
    state: State
    beat: Beat | None = None
    for_s: float = 0.0
    life: Life = Life.UNKNOWN
    seen: bool = False
    why: str = "has not said anything"

    @property
    def lost(self) -> bool:
        """Nothing more is to be expected of the process unless somebody helps."""
        return self.state in (State.STOPPED, State.STUCK, State.DEAD)

    @property
    def is_over(self) -> bool:
        """The process has said its last word."""
        return self.beat is not None and self.beat.phase in (ENDED, FAILED)

    def __str__(self) -> str:
        """One line: who, state, since when, in which phase, log."""
        if self.beat is None:
            return f"{self.name} {self.why}"
        log = f", log {self.beat.log}" if self.beat.log else ""
        return f"{self.beat} {self.why}; phase {self.beat.phase!r}{log}"


class Pulse:
    """Judges one process by its beats. Pure: reading, clock and kernel are given.

    Args:
        name: of the process.
        limits: when it is silent, and when dead.
    """

    def __init__(self, name: str, limits: Limits) -> None:
        self._name, self._limits = name, limits
        # Time that passes between two looks counts up to here; more than that the reader has slept itself.
        self._step_s = min(_LOOK_AT_MOST_S, max(limits.silence_s / 2, _LOOK_AT_LEAST_S))
        self._looked: float | None = None
        self._beat: Beat | None = None
        self._silent_s = self._still_s = 0.0
        self._seen = False

    def observe(self, beat: Beat | None, now: float, life: Life = Life.UNKNOWN) -> Verdict:
        """Look once; to be called about once a second.

        Args:
            beat: what the file says; None if it is not there, or cannot be read just now.
            now: the reader's clock, seconds, monotonic.
            life: what the kernel says of the process that wrote it, asked after the file was read.
        """
        passed = 0.0 if self._looked is None else min(max(0.0, now - self._looked), self._step_s)
        self._looked, before = now, self._beat
        beat = beat or before
        if beat is None:
            return Verdict(self._name, State.ABSENT)
        self._silent_s = self._silent_s + passed if beat == before else 0.0
        self._still_s = self._still_s + passed if before is not None and _work(beat) == _work(before) else 0.0
        self._seen |= life in (Life.RUNNING, Life.STOPPED, Life.TRACED) or (before is not None and beat != before)
        # Gone without a last word, unless the word was written after the file was read: the next look will tell.
        gone = life is Life.GONE and beat == before
        self._beat = beat
        state, for_s, why = self._judge(beat, gone, life)
        return Verdict(self._name, state, beat, for_s, life, self._seen, why)

    def _judge(self, beat: Beat, gone: bool, life: Life) -> tuple[State, float, str]:
        silent, still, limits = self._silent_s, self._still_s, self._limits
        may_s = beat.phase_deadline_s
        if beat.phase == ENDED:
            return State.ENDED, silent, "has ended"
        if beat.phase == FAILED:
            return State.DEAD, silent, "has failed"
        if gone:
            return State.DEAD, silent, "is gone: its process does not exist any more"
        if silent > limits.silence_s and life is Life.STOPPED:
            return State.STOPPED, silent, f"is stopped (SIGSTOP?) and has been silent for {silent:.0f} s"
        if silent > limits.timeout_s:
            return State.DEAD, silent, f"has been silent for {silent:.0f} s"
        if silent > limits.silence_s:
            return State.SILENT, silent, f"has been silent for {silent:.0f} s"
        if may_s is not None and still > may_s + limits.silence_s:
            return State.STUCK, still, f"is stuck: no progress for {still:.0f} s, where {may_s:g} s are the limit"
        return State.ALIVE, still, "is alive"


class Watch:
    """Looks at the heartbeats of a run; one `Pulse` for each file that appears.

    Args:
        paths: of the run.
        limits: when a process is silent, and when dead.
        roles: whose; None is everybody's.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        paths: RunPaths,
        limits: Limits,
        roles: tuple[str, ...] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths, self._limits, self._roles, self._clock = paths, limits, roles, clock
        self._pulses: dict[str, Pulse] = {}

    def look(self) -> list[Verdict]:
        """Read all files and judge all processes, in the order of their names. Reads small files; blocks no longer."""
        beats = read_beats(self._paths, self._roles)
        for name in beats:
            self._pulses.setdefault(name, Pulse(name, self._limits))
        there = [path.stem for path in _files(self._paths, None)]
        for name in [name for name in self._pulses if name not in beats and there and name not in there]:
            del self._pulses[name]  # a new start has removed it, one of fewer ranks perhaps
        now = self._clock()
        lives = {name: life_of(beat) for name, beat in beats.items()}
        return [
            pulse.observe(beats.get(name), now, lives.get(name, Life.UNKNOWN))
            for name, pulse in sorted(self._pulses.items())
        ]


def forget(paths: RunPaths, role: str, keep: Collection[str]) -> None:
    """Remove what others of `role` have left, such as the ranks of a larger trainer; none of `keep` is touched."""
    for beat in read_beats(paths, (role,)).values():
        if beat.name not in keep:
            with suppress(OSError):  # it only confuses
                paths.heartbeat(beat.name).unlink()


def read_beats(paths: RunPaths, roles: tuple[str, ...] | None = None) -> dict[str, Beat]:
    """Read what is in `heartbeats/` by name, of some roles or of all.

    What cannot be read just now, or is no heartbeat, is left out.
    """
    read = [read_beat(path) for path in _files(paths, roles)]
    return {beat.name: beat for beat in read if beat is not None}


def _files(paths: RunPaths, roles: tuple[str, ...] | None) -> list[Path]:
    """List the files; a role is the first part of a name, so that nobody reads a thousand ranks to find one process."""
    try:
        files = sorted(path for path in paths.heartbeats_dir.iterdir() if path.suffix == ".json")
    except OSError:  # not there yet; or a network file system that will answer the next time
        return []
    return [path for path in files if roles is None or path.stem.split("_")[0] in roles]


def read_beat(path: Path) -> Beat | None:
    """Read one heartbeat; None if it is not there, cannot be read just now, or is none."""
    try:
        told = json.loads(path.read_bytes())
        touched = path.stat().st_mtime_ns
        names = [entry.name for entry in fields(Beat) if entry.name != "touched"]
        return Beat(**{name: told[name] for name in names}, touched=touched) if told["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def life_of(beat: Beat) -> Life:
    """Ask the kernel for the process that wrote `beat`; unknown where it is not on this node."""
    if not beat.boot_id or beat.boot_id != boot_id() or beat.host != socket.gethostname():
        return Life.UNKNOWN
    letter, started = process_state(beat.pid)
    if letter in ("", "Z", "X") or started != beat.started:
        return Life.GONE
    return {"T": Life.STOPPED, "t": Life.TRACED}.get(letter, Life.RUNNING)


def boot_id() -> str:
    """Name this start of the kernel and this namespace of processes; "" where there is no /proc."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def own_log() -> str:
    """The file that takes this process's stderr; "" if it is none (a terminal, a pipe)."""
    try:
        path = Path("/proc/self/fd/2").readlink()
    except OSError:
        return ""
    return str(path) if path.is_file() else ""


def process_state(pid: int) -> tuple[str, int]:
    """The state of a process, as the kernel's letter, and when it began, in ticks since boot; ("", 0) if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0
    after = text.rpartition(")")[2].split()  # the name in parentheses may hold anything
    return after[0], int(after[19])


def _work(beat: Beat) -> tuple[object, ...]:
    """What changes when a process gets on with its work."""
    return beat.boot_id, beat.pid, beat.started, beat.phase, beat.progress
