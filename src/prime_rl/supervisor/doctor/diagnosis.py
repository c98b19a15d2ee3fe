"""Derives the problems of a run from its facts, which `examine` observes.

The others are pure functions, so that every case can be tested with made-up facts.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pydantic import ValidationError

from prime_rl.configs.heartbeat import HeartbeatConfig
from prime_rl.liveness.heartbeat_monitor import (
    FAILED,
    HeartbeatMonitor,
    HeartbeatRecord,
    KernelState,
    LivenessReport,
    ProcessState,
    read_heartbeats,
)
from prime_rl.monitors.bottleneck import Bottleneck, find_bottleneck
from prime_rl.monitors.findings import find_problems
from prime_rl.storage.paths import RUN_FOLDER, RunPaths
from prime_rl.supervisor.doctor.collect import (
    ROLES,
    RunFacts,
    find_joined_runs,
    read_facts,
    read_run_config,
)

_MIN_FREE_BYTES = 100 * 2**20
_MAX_START_SECONDS = 30.0
"""Time from the start of a process until its first heartbeat, or until a trainer of several runs sees a new one."""
_STARTS, _FINAL_EVENTS = ("started", "restarted"), ("failed", "finished")
_CONTINUE_HINT = "`kill -CONT {}` continues it"
_OBSERVE_INTERVAL_SECONDS = 1.0
_NUM_OBSERVATIONS = 2
"""After the first one: enough for each process to write another heartbeat."""
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
    """No process has written to this directory."""
    REFUSED = "refused"
    EVICTED = "evicted"
    """The trainer of several runs does not take this one, or has stopped it."""


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
    def phase_seconds(self) -> float:
        """Duration of the phase by the clock of the process, seconds."""
        return max(0.0, self.beat.written - self.beat.phase_since)

    @property
    def unresponsive(self) -> bool:
        """Whether the process is lost or stopped, so waiting for it may not end."""
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
        findings: what is probably wrong with the learning.
        bottleneck: what limits the speed; None before there are enough steps.
        notes: noteworthy facts that are no problems.
        facts: what the diagnosis is based on.
        runs: those that share the trainer of the directory; their problems are also in `problems`.
    """

    state: RunState
    processes: tuple[Process, ...]
    chain: tuple[Process, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    facts: RunFacts = field(repr=False)
    runs: tuple["Diagnosis", ...] = ()
    findings: tuple[str, ...] = ()
    bottleneck: Bottleneck | None = None

    @property
    def healthy(self) -> bool:
        """Whether no problem was found."""
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
    trainer, orchestrator = (facts.lines.get(role, ()) for role in ("trainer", "orchestrator"))
    starts = [float(str(event.get("time", 0))) for event in facts.events if event.get("event") in _STARTS]
    saved = [commit.step for commit in facts.checkpoints]
    findings = tuple(find_problems(trainer, orchestrator, facts.warnings, saved))
    return Diagnosis(
        state, processes, chain, problems, tuple(_notes(facts, state, processes, findings)), facts, findings=findings,
        bottleneck=find_bottleneck(
            [row for row in trainer if facts.resume is None or row.get("step", 0) >= facts.resume.step],
            orchestrator, max(starts, default=0.0), facts.settings.speed,
        ),
    )  # fmt: skip


def _process(report: LivenessReport, stopped: set[int], facts: RunFacts) -> Process:
    beat = report.heartbeat
    process = Process(beat, report.state, report.description)
    phase_seconds, limit_seconds = process.phase_seconds, beat.phase_deadline_s
    is_stopped = report.kernel_state is KernelState.STOPPED or (
        beat.pid in stopped and report.kernel_state is not KernelState.UNKNOWN
    )
    no_progress = report.duration_seconds >= 0.9 * facts.watched_seconds > 1
    if is_stopped and process.state not in (ProcessState.ENDED, ProcessState.DEAD):
        return Process(beat, ProcessState.STOPPED, "is stopped (SIGSTOP?)")
    if (
        process.state is ProcessState.ALIVE
        and limit_seconds is not None
        and phase_seconds > limit_seconds
        and no_progress
    ):
        # `doctor` observes too briefly to measure so long a wait, so the process's own clock counts.
        why = (
            f"is stuck: {phase_seconds:.0f} s in one phase with a limit of {limit_seconds:g} s, "
            "and no progress while observed"
        )
        return Process(beat, ProcessState.STUCK, why)
    if process.state is ProcessState.SILENT:
        ago = duration(facts.now - beat.written)
        return Process(beat, process.state, f"{process.why}, last heartbeat {ago} ago by its own clock")
    return process


def _state(facts: RunFacts, processes: Sequence[Process]) -> RunState:
    """The last event decides, then the processes: a run without `rl` has no events."""
    if facts.evicted is not None or facts.refused is not None:
        return RunState.REFUSED if facts.evicted is None else RunState.EVICTED
    # The failure of a run does not end the others that share its trainer.
    names = ((event, str(event.get("name"))) for event in facts.events)
    own = [event for event, name in names if name == facts.root.name or not RUN_FOLDER.fullmatch(name)]
    decisive = [event for event in own if event.get("event") in (*_STARTS, *_FINAL_EVENTS)]
    last = decisive[-1] if decisive else {}
    if last.get("event") == "failed":
        return RunState.FAILED
    if last.get("event") == "finished":
        return RunState.STOPPED if "stopped" in str(last.get("detail", "")) else RunState.FINISHED
    if facts.owner is not None or any(p.state not in (ProcessState.ENDED, ProcessState.DEAD) for p in processes):
        return RunState.RUNNING
    if any(process.state is ProcessState.DEAD for process in processes) or last or (facts.errors and not processes):
        return RunState.DEAD
    most, trained = facts.settings.max_steps, facts.trained["step"] + 1 if facts.trained else 0
    if most is not None and trained < most:
        return RunState.STOPPED if processes else RunState.QUIET
    return RunState.FINISHED if processes or most is not None else RunState.QUIET


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
    elif state is RunState.REFUSED:
        hint = "change the configuration of the run, and start its orchestrator again"
        yield Problem(f"the trainer does not take this run: {facts.refused}", hint=hint)
    elif state is RunState.EVICTED:
        hint = f"remove {RunPaths(facts.root).evicted}, and start its orchestrator again"
        yield Problem(f"the trainer has stopped this run: {facts.evicted}", hint=hint)
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
    awaited = {process.beat.waiting_for for process in processes if process.phase_seconds > _MAX_START_SECONDS}
    for role in sorted(set(ROLES) & awaited - present - {"inference"}):  # a standalone server may have no heartbeat
        yield Problem(f"another process waits for {role}, which has never written a heartbeat", role)


def _failure(facts: RunFacts) -> Problem:
    event = next(event for event in reversed(facts.events) if event.get("event") in ("failed", "error"))
    if event.get("event") == "error":  # the line that `rl` has shown
        return Problem(str(event.get("detail")), str(event.get("name")), _resume_hint(facts))
    name = str(event.get("name"))
    cause = facts.errors.get(name) or facts.errors.get(str(event.get("role")))
    exits = [e for e in facts.events if e.get("event") == "ended" and e.get("name") == name]
    cause = cause or (str(exits[-1].get("detail") or "") if exits else "")
    how = event.get("detail") or f"exited with code {event.get('code')}"
    log = RunPaths(facts.root).log(str(event.get("role") or name))
    return Problem(f"{name} {how}{f': {cause}' if cause else ''}; log {log}", name, _resume_hint(facts))


def _death(facts: RunFacts, processes: Sequence[Process]) -> Problem:
    """The process that reported an error, else the one whose last heartbeat is the oldest."""
    dead = [process for process in processes if process.state is ProcessState.DEAD]
    dead.sort(key=lambda process: (process.beat.role == "rl", process.beat.written))
    for role, message in facts.errors.items():
        culprit = next((p.name for p in dead if p.beat.role == role), role)
        return Problem(f"{role} has failed: {message}", culprit, _resume_hint(facts))
    names = ", ".join(p.name for p in dead if p.beat.phase != FAILED)
    # A launcher kills the other ranks of the one that failed.
    failed = [p for p in dead if p.beat.phase == FAILED and (p is dead[0] or p.beat.error)]
    if failed:
        beat = failed[0].beat
        error, log = (f": {beat.error}" if beat.error else ""), (f"; log {beat.log}" if beat.log else "")
        killed = f"; {names} wrote no last heartbeat" if names else ""
        return Problem(f"{beat} has failed{error}{killed}{log}", failed[0].name, _resume_hint(facts))
    text = f"all processes are gone, and {names or 'rl'} wrote no last heartbeat: killed, possibly out of memory"
    return Problem(text, dead[0].name if dead else "rl", _resume_hint(facts))


def _resume_hint(facts: RunFacts) -> str | None:
    if not facts.checkpoints:
        return None
    step = facts.checkpoints[-1].step
    return f"checkpoint {step} is complete: the same command with `--ckpt.resume-step -1` resumes from it"


def _notes(facts: RunFacts, state: RunState, processes: Sequence[Process], findings: Sequence[str]) -> Iterator[str]:
    if state in (RunState.FINISHED, RunState.STOPPED):
        yield from (f"{p.beat} wrote no last heartbeat" for p in processes if p.state is ProcessState.DEAD)
    if facts.slow_rank is not None:
        yield facts.slow_rank
    latest = {(warning.get("kind"), warning.get("env")): warning for warning in facts.warnings}
    for warning in latest.values():
        cause = str(warning.get("cause") or warning.get("text"))
        is_signal = (warning.get("kind"), warning.get("env")) == ("signal", "")
        if warning.get("text") and not is_signal and not any(cause in finding for finding in findings):
            ago = duration(facts.now - float(str(warning.get("time", facts.now))))
            yield f"{warning['text']} ({ago} ago)"
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
    for report in reports:
        beat = report.heartbeat
        is_over = report.state in (ProcessState.ENDED, ProcessState.DEAD) or report.kernel_state is KernelState.STOPPED
        is_overdue = beat.written - beat.phase_since > (beat.phase_deadline_s or math.inf)
        if not is_over and (is_overdue or beat == first.get(report.name)):
            return False
    return True


def size(count: float) -> str:
    """Format a number of bytes with a decimal unit, such as `1.2 GB`."""
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


def examine(paths: RunPaths) -> Diagnosis:
    """Observe the heartbeats for a moment, longer if a process writes none, and diagnose; also all joined runs."""
    observed = [_Observation(one) for one in (paths, *find_joined_runs(paths))]
    begin, count = time.monotonic(), 0
    while not all(one.is_complete(count) for one in observed):
        time.sleep(_OBSERVE_INTERVAL_SECONDS)  # a missing heartbeat causes no event, so this polls
        count += 1
        for one in observed:
            one.poll()
    seconds = time.monotonic() - begin
    found = [diagnose(read_facts(one.paths, tuple(one.reports), time.time(), seconds)) for one in observed]
    return add_runs(found[0], found[1:]) if found[1:] else found[0]


class _Observation:
    """The heartbeats of one directory, polled until longer observation changes nothing."""

    def __init__(self, paths: RunPaths) -> None:
        limits = HeartbeatConfig().limits
        with suppress(ValidationError):  # a run of another version
            limits = HeartbeatConfig.model_validate(read_run_config(paths).get("heartbeat", {})).limits
        self.paths, self._first, self._monitor = paths, read_heartbeats(paths), HeartbeatMonitor(paths, limits)
        longest = int((limits.warn_after_seconds + 1) / _OBSERVE_INTERVAL_SECONDS) + 1
        self._longest = longest if self._first else 0
        self.poll()

    def poll(self) -> None:
        self.reports = self._monitor.poll()

    def is_complete(self, count: int) -> bool:
        """Whether it need not be polled again after `count` intervals."""
        is_over = all(report.state in (ProcessState.ENDED, ProcessState.DEAD) for report in self.reports)
        is_settled_now = count >= _NUM_OBSERVATIONS and is_settled(self._first, self.reports)
        return count >= self._longest or is_over or is_settled_now


def add_runs(trainer: Diagnosis, runs: Sequence[Diagnosis]) -> Diagnosis:
    """Add the runs that share a trainer to the diagnosis of its directory.

    Their problems follow its own, without those that the trainer causes in each of them.
    """
    known = {process.beat.role for process in trainer.processes} | {p.name for p in trainer.processes if p.unresponsive}
    problems = list(trainer.problems)
    for run in runs:
        name = run.facts.root.name
        for problem in run.problems:
            if problem.culprit not in known:
                culprit = problem.culprit and f"{name}/{problem.culprit}"
                problems.append(Problem(f"{name}: {problem.text}", culprit, problem.hint))
    settings = replace(trainer.facts.settings, max_steps=None, ckpt=None)  # the runs have them
    return replace(trainer, problems=tuple(problems), runs=tuple(runs), facts=replace(trainer.facts, settings=settings))
