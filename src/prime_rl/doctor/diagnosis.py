"""Derives the problems of a run from its facts. Pure functions, so that every case can be tested with made-up facts."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from prime_rl.doctor.collect import ROLES, RunFacts
from prime_rl.liveness.heartbeat_monitor import HeartbeatRecord, KernelState, LivenessReport, ProcessState
from prime_rl.monitors.learning_signal import find_missing_signal
from prime_rl.storage.paths import RunPaths

_MIN_FREE_BYTES = 100 * 2**20
_FINAL_EVENTS = ("failed", "finished")
_CONTINUE_HINT = "`kill -CONT {}` continues it"
UNRESPONSIVE = (
    ProcessState.STOPPED,
    ProcessState.DEAD,
    ProcessState.STUCK,
    ProcessState.SILENT,
    ProcessState.UNREACHABLE,
)
"""States in which a process may never answer; the most certain first."""


class RunState(StrEnum):
    """State of the run as a whole."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped by a signal"
    FAILED = "failed"
    DEAD = "dead"
    """No process is alive, and none has reported an error."""
    QUIET = "not running"
    """The directory has no trace of processes."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the run: its last heartbeat, its diagnosed state, and the state in words, without the name."""

    beat: HeartbeatRecord
    state: ProcessState
    why: str

    @property
    def name(self) -> str:
        """`trainer_0`, `orchestrator`, `inference`, `rl`."""
        return self.beat.name

    @property
    def phase_s(self) -> float:
        """Duration of the phase by the clock of the process, seconds."""
        return max(0.0, self.beat.written - self.beat.phase_since)

    @property
    def unresponsive(self) -> bool:
        """Whether it may never answer."""
        return self.state in UNRESPONSIVE


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of the run on one line, the process that causes it, and how to fix it."""

    text: str
    culprit: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of `doctor`.

    Attributes:
        processes: of the run, by name.
        chain: which process waits for which, from the trainer to the one that blocks all; [] if none waits.
        problems: the most severe first.
        notes: noteworthy facts that are no problems.
        facts: what the diagnosis is based on.
    """

    state: RunState
    processes: tuple[Process, ...]
    chain: tuple[Process, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    facts: RunFacts = field(repr=False)

    @property
    def healthy(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    @property
    def culprit(self) -> str | None:
        """The process that causes the most severe problem with a culprit."""
        return next((problem.culprit for problem in self.problems if problem.culprit), None)


def diagnose(facts: RunFacts) -> Diagnosis:
    """Diagnose a run."""
    stopped = {one.pid for one in facts.stopped if not one.traced}
    processes = tuple(_process(report, stopped, facts) for report in facts.reports)
    state = _state(facts, processes)
    chain = tuple(_chain(processes)) if state is RunState.RUNNING else ()
    problems = tuple(_problems(facts, state, processes, chain))
    return Diagnosis(state, processes, chain, problems, tuple(_notes(facts, state, processes)), facts)


def _process(report: LivenessReport, stopped: set[int], facts: RunFacts) -> Process:
    beat = report.heartbeat
    process = Process(beat, report.state, report.description)
    phase_s, limit_s = process.phase_s, beat.phase_deadline_s
    is_stopped = report.kernel_state is KernelState.STOPPED or (
        beat.pid in stopped and report.kernel_state is not KernelState.UNKNOWN
    )
    no_progress = report.duration_seconds >= 0.9 * facts.watched_s > 1
    if is_stopped and process.state not in (ProcessState.ENDED, ProcessState.DEAD):
        return Process(beat, ProcessState.STOPPED, "is stopped (SIGSTOP?)")
    if process.state is ProcessState.ALIVE and limit_s is not None and phase_s > limit_s and no_progress:
        # `doctor` observes too briefly to measure so long a wait, so the process's own clock counts.
        why = f"is stuck: {phase_s:.0f} s in one phase with a limit of {limit_s:g} s, and no progress while observed"
        return Process(beat, ProcessState.STUCK, why)
    if process.state is ProcessState.SILENT:
        ago = duration(facts.now - beat.written)
        return Process(beat, process.state, f"{process.why}, last heartbeat {ago} ago by its own clock")
    return process


def _state(facts: RunFacts, processes: Sequence[Process]) -> RunState:
    """The last event decides, then the processes: a run without `rl` has no events."""
    decisive = [event for event in facts.events if event.get("event") in ("started", "restarted", *_FINAL_EVENTS)]
    last = decisive[-1] if decisive else {}
    if last.get("event") == "failed":
        return RunState.FAILED
    if last.get("event") == "finished":
        return RunState.STOPPED if "stopped" in str(last.get("detail", "")) else RunState.FINISHED
    if facts.owner is not None or any(p.state not in (ProcessState.ENDED, ProcessState.DEAD) for p in processes):
        return RunState.RUNNING
    if any(process.state is ProcessState.DEAD for process in processes) or last:
        return RunState.DEAD
    most, trained = facts.settings.max_steps, facts.trained
    all_done = most is not None and trained is not None and trained["step"] + 1 >= most
    return RunState.FINISHED if processes or all_done else RunState.QUIET


def _chain(processes: Sequence[Process]) -> Iterator[Process]:
    """Follow the waits from the trainer on; of several processes of a role, an unresponsive one comes first."""
    waiting = [p for p in processes if p.beat.role in ROLES and p.beat.waiting_for and not p.unresponsive]
    here = min(waiting, key=lambda p: ROLES.index(p.beat.role), default=None)
    seen: set[str] = set()
    while here is not None and here.name not in seen:
        seen.add(here.name)
        yield here
        others = [] if here.unresponsive else [p for p in processes if p.beat.role == here.beat.waiting_for]
        here = min(others, key=lambda p: 0 if p.unresponsive else 1 if p.beat.waiting_for else 2, default=None)


def _problems(
    facts: RunFacts, state: RunState, processes: Sequence[Process], chain: Sequence[Process]
) -> Iterator[Problem]:
    if state is RunState.FAILED:
        yield _failure(facts)
    elif state is RunState.DEAD:
        yield _death(facts, processes)
    elif state is RunState.RUNNING:
        yield from _unresponsive(facts, processes, chain)
    elif state is RunState.QUIET:
        yield Problem("no process has left a trace: the run was not started, or with a version without heartbeats")
    if (disk := facts.disk) is not None:
        need = disk.version + (disk.checkpoint if facts.settings.ckpt is not None else 0)
        if disk.free < max(need, _MIN_FREE_BYTES):
            yield Problem(f"the disk has {size(disk.free)} left, and the next version and checkpoint need {size(need)}")


def _unresponsive(facts: RunFacts, processes: Sequence[Process], chain: Sequence[Process]) -> Iterator[Problem]:
    """Processes that may never answer: the end of the chain first, then the most certain ones."""
    lost = [process for process in processes if process.unresponsive]
    last = chain[-1].name if chain else None
    for process in sorted(lost, key=lambda p: (p.name != last, UNRESPONSIVE.index(p.state))):
        beat = process.beat
        log = f", log {beat.log}" if beat.log else ""
        hint = _CONTINUE_HINT.format(beat.pid) if process.state is ProcessState.STOPPED else None
        yield Problem(f"{beat} {process.why}; phase {beat.phase!r}{log}", process.name, hint)
    # The process ids of other hosts can coincide with local ones.
    lost_names, local = {process.name for process in lost}, (report for report in facts.reports if report.is_local)
    named = {report.heartbeat.pid for report in local if report.name in lost_names}
    for one in facts.stopped:
        if one.pid not in named and not one.traced:
            text = f"{one.name} (pid {one.pid}, {one.command}) is stopped (SIGSTOP?)"
            yield Problem(text, one.name, _CONTINUE_HINT.format(one.pid))
    present = {process.beat.role for process in processes}
    awaited = {process.beat.waiting_for for process in processes if process.beat.waiting_for}
    for role in sorted(awaited - present - {"inference"}):  # a standalone server may have no heartbeat
        yield Problem(f"another process waits for {role}, which has never written a heartbeat", role)


def _failure(facts: RunFacts) -> Problem:
    event = next(event for event in reversed(facts.events) if event.get("event") == "failed")
    name = str(event.get("name"))
    cause = facts.errors.get(name) or facts.errors.get(str(event.get("role")))
    exits = [e for e in facts.events if e.get("event") == "ended" and e.get("name") == name]
    cause = cause or (str(exits[-1].get("detail") or "") if exits else "")
    how = event.get("detail") or f"exited with code {event.get('code')}"
    log = RunPaths(facts.root).log(str(event.get("role") or name))
    return Problem(f"{name} {how}{f': {cause}' if cause else ''}; log {log}", name, _resume_hint(facts))


def _death(facts: RunFacts, processes: Sequence[Process]) -> Problem:
    """The process that reported an error, else the first one that died."""
    dead = sorted((p for p in processes if p.state is ProcessState.DEAD), key=lambda p: p.beat.role == "rl")
    for role, message in facts.errors.items():
        culprit = next((p.name for p in dead if p.beat.role == role), role)
        return Problem(f"{role} has failed: {message}", culprit, _resume_hint(facts))
    names = ", ".join(p.name for p in dead) or "rl"
    text = f"all processes are gone, and {names} wrote no last heartbeat: killed, possibly out of memory"
    return Problem(text, dead[0].name if dead else "rl", _resume_hint(facts))


def _resume_hint(facts: RunFacts) -> str | None:
    if not facts.checkpoints:
        return None
    step = facts.checkpoints[-1].step
    return f"checkpoint {step} is complete: the same command with `--ckpt.resume-step -1` resumes from it"


def _notes(facts: RunFacts, state: RunState, processes: Sequence[Process]) -> Iterator[str]:
    if state in (RunState.FINISHED, RunState.STOPPED):
        yield from (f"{p.beat} wrote no last heartbeat" for p in processes if p.state is ProcessState.DEAD)
    if (missing := find_missing_signal(facts.batches)) is not None:
        yield missing
    for name, why in sorted(facts.broken.items()):
        if state is RunState.RUNNING and "was not finished" in why:
            yield f"checkpoint {name} is being written, or was not finished"
        else:
            yield f"checkpoint {name} is not usable: {why}"
    for one in facts.stopped:
        if one.traced:
            yield f"{one.name} (pid {one.pid}, {one.command}) is traced by a debugger"
    for name in facts.settings.host_environments:
        yield f'environment {name} may execute model output on this machine (runtime = "subprocess")'
    if facts.resume is not None and facts.resume.branch:
        yield f"branch {facts.resume.branch} began at step {facts.resume.step}"
    restarts: dict[str, list[Mapping[str, object]]] = {}
    for event in facts.events:
        if event.get("event") == "restarted":
            restarts.setdefault(str(event.get("name")), []).append(event)
    for name, events in restarts.items():
        count = f"{len(events)} {'time' if len(events) == 1 else 'times'}"
        ago = duration(facts.now - float(str(events[-1].get("time", facts.now))))
        yield f"{name} was restarted {count}; the last time {ago} ago: {events[-1].get('detail') or 'no reason'}"


def is_settled(first: Mapping[str, HeartbeatRecord], reports: Iterable[LivenessReport]) -> bool:
    """Whether longer observation changes nothing: each process has written a heartbeat, has exited, or is gone."""
    return all(
        report.state in (ProcessState.ENDED, ProcessState.DEAD)
        or report.kernel_state is KernelState.STOPPED
        or (report.heartbeat != first.get(report.name) and not _is_overdue(report.heartbeat))
        for report in reports
    )


def _is_overdue(beat: HeartbeatRecord) -> bool:
    return beat.written - beat.phase_since > (beat.phase_deadline_s or math.inf)


def size(count: float) -> str:
    """Bytes with a decimal unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def duration(seconds: float) -> str:
    """Seconds as `34 s`, `12 min` or `3.5 h`."""
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
