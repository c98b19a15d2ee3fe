"""From what was read of a run to what is to be thought of it. Pure, so that every case can be made up and tested.

Whoever is lost comes before whoever only waits for him: the culprit is the end of the chain, not its beginning.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from prime_rl.doctor.facts import ROLES, Disk, Facts, Halted
from prime_rl.doctor.words import duration, size
from prime_rl.run.heartbeat import Beat, Life, State, Verdict
from prime_rl.run.paths import RunPaths

_LITTLE_ROOM = 100 * 2**20
_FATAL = ("failed", "finished")
_NOTABLE = ("restarted", "killed", "stopped", "silent", "stuck", "traced")
DEAF = (State.STOPPED, State.DEAD, State.STUCK, State.SILENT)
"""Who waits for such a process may wait for ever; the surest first."""


class RunState(StrEnum):
    """What becomes of the run as a whole."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped by a signal"
    FAILED = "failed"
    DEAD = "dead"
    """Nobody is alive, and nobody has said why."""
    QUIET = "not running"
    """Nothing in the directory tells of processes."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the run.

    Attributes:
        name: `trainer_0`, `orchestrator`, `inference`, `rl`.
        role: that it plays.
        pid: its process id, on `host`.
        host: its node.
        state: what is to be thought of it.
        why: the state in words, without who.
        phase: what it does, or did last.
        phase_s: for how long, by its own clock.
        waiting_for: the role that it waits for.
        log: its log.
    """

    name: str
    role: str
    pid: int
    host: str
    state: State
    why: str
    phase: str
    phase_s: float
    waiting_for: str | None
    log: str

    @property
    def deaf(self) -> bool:
        """Who waits for it may wait for ever."""
        return self.state in DEAF


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong.

    Attributes:
        text: one line.
        culprit: the process that it is about, if it is about one.
        hint: what to do.
    """

    text: str
    culprit: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `doctor` says.

    Attributes:
        state: of the run.
        processes: of the run, by name.
        chain: who waits for whom, from the trainer to whoever keeps all waiting; [] where nobody waits.
        problems: the gravest first.
        notes: what is worth knowing and not wrong.
        facts: on which all this rests.
    """

    state: RunState
    processes: tuple[Process, ...]
    chain: tuple[Process, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    facts: Facts = field(repr=False)

    @property
    def healthy(self) -> bool:
        """Nothing is wrong."""
        return not self.problems

    @property
    def culprit(self) -> str | None:
        """Who is to blame, if somebody is."""
        return next((problem.culprit for problem in self.problems if problem.culprit), None)


def diagnose(facts: Facts) -> Diagnosis:
    """Judge a run."""
    halted = {one.pid: one for one in facts.halted if not one.traced}
    processes = tuple(_process(verdict, halted, facts) for verdict in facts.verdicts if verdict.beat is not None)
    state = _state(facts, processes)
    chain = tuple(_chain(processes)) if state is RunState.RUNNING else ()
    problems = list(_problems(facts, state, processes, chain))
    return Diagnosis(state, processes, chain, tuple(problems), tuple(_notes(facts, state, processes)), facts)


def _process(verdict: Verdict, halted: Mapping[int, Halted], facts: Facts) -> Process:
    beat = verdict.beat
    assert beat is not None
    state, why = verdict.state, verdict.why
    phase_s = max(0.0, beat.written - beat.phase_since)
    may_s = beat.phase_deadline_s
    stopped = verdict.life is Life.STOPPED or (beat.pid in halted and verdict.life is not Life.UNKNOWN)
    if stopped and state not in (State.ENDED, State.DEAD):
        state, why = State.STOPPED, "is stopped (SIGSTOP?)"
    elif state is State.ALIVE and may_s is not None and phase_s > may_s and verdict.for_s >= 0.9 * facts.watched_s > 1:
        # A look is too short to see so long a wait; how long the phase has lasted the process says itself.
        why = f"is stuck: {phase_s:.0f} s in one phase, where {may_s:g} s are the limit, and no progress while watched"
        state = State.STUCK
    elif state is State.SILENT:
        why += f", its last word {duration(facts.now - beat.written)} ago by its own clock"
    return Process(
        beat.name, beat.role, beat.pid, beat.host, state, why, beat.phase, phase_s, beat.waiting_for, beat.log
    )


def _state(facts: Facts, processes: Sequence[Process]) -> RunState:
    """The last event decides, then who is alive: the events of a run by hand are nobody's."""
    decisive = [event for event in facts.events if event.get("event") in ("started", "restarted", *_FATAL)]
    last = decisive[-1] if decisive else {}
    if last.get("event") == "failed":
        return RunState.FAILED
    if last.get("event") == "finished":
        return RunState.STOPPED if "stopped" in str(last.get("detail", "")) else RunState.FINISHED
    if facts.owner is not None or any(process.state not in (State.ENDED, State.DEAD) for process in processes):
        return RunState.RUNNING
    if any(process.state is State.DEAD for process in processes) or last:
        return RunState.DEAD
    if processes or _all_done(facts):
        return RunState.FINISHED
    return RunState.QUIET


def _all_done(facts: Facts) -> bool:
    most, trained = facts.settings.max_steps, facts.trained
    return most is not None and trained is not None and trained["step"] + 1 >= most


def _chain(processes: Sequence[Process]) -> Iterator[Process]:
    """Follow who waits for whom, from the trainer on; of several of a role, one who does not get on is followed."""
    here = next((p for role in ROLES for p in processes if p.role == role and p.waiting_for and not p.deaf), None)
    seen: set[str] = set()
    while here is not None and here.name not in seen:
        seen.add(here.name)
        yield here
        role = None if here.deaf else here.waiting_for
        others = [process for process in processes if process.role == role]
        here = next((p for p in others if p.deaf), next((p for p in others if p.waiting_for), next(iter(others), None)))


def _problems(
    facts: Facts, state: RunState, processes: Sequence[Process], chain: Sequence[Process]
) -> Iterator[Problem]:
    if state is RunState.FAILED:
        yield _failure(facts)
    elif state is RunState.DEAD:
        yield _death(facts, processes)
    elif state is RunState.RUNNING:
        yield from _losses(facts, processes, chain)
    elif state is RunState.QUIET:
        yield Problem("nothing tells of a process: the run was not started, or before processes left heartbeats")
    if facts.disk is not None and (problem := _room(facts.disk, facts.settings.ckpt is not None)):
        yield problem


def _losses(facts: Facts, processes: Sequence[Process], chain: Sequence[Process]) -> Iterator[Problem]:
    """Who does not get on: the end of the chain first, then by how sure it is."""
    named = {process.pid for process in processes if process.deaf}
    lost = [process for process in processes if process.deaf]
    last = chain[-1].name if chain else None
    for process in sorted(lost, key=lambda p: (p.name != last, DEAF.index(p.state))):
        log = f", log {process.log}" if process.log else ""
        hint = f"`kill -CONT {process.pid}` lets it go on" if process.state is State.STOPPED else None
        yield Problem(f"{_who(process)} {process.why}; phase {process.phase!r}{log}", process.name, hint)
    for one in facts.halted:
        if one.pid not in named and not one.traced:
            hint = f"`kill -CONT {one.pid}` lets it go on"
            yield Problem(f"{one.name} (pid {one.pid}, {one.command}) is stopped (SIGSTOP?)", one.name, hint)
    missing = [role for role in {p.waiting_for for p in processes if p.waiting_for} if not _of(role, processes)]
    for role in sorted(role for role in missing if role != "inference"):  # a server by hand may have no heartbeat
        yield Problem(f"{role} is waited for and has never said anything", role)


def _failure(facts: Facts) -> Problem:
    event = next(event for event in reversed(facts.events) if event.get("event") == "failed")
    name = str(event.get("name"))
    why = facts.errors.get(name) or facts.errors.get(str(event.get("role")))
    ends = [e for e in facts.events if e.get("event") == "ended" and e.get("name") == name]
    why = why or (str(ends[-1].get("detail") or "") if ends else "")
    how = event.get("detail") or f"ended with exit code {event.get('code')}"
    log = RunPaths(facts.root).log(str(event.get("role") or name))
    return Problem(f"{name} {how}{f': {why}' if why else ''}; log {log}", name, _how_to_go_on(facts))


def _death(facts: Facts, processes: Sequence[Process]) -> Problem:
    """Whoever said why, else the first who was gone."""
    dead = sorted((p for p in processes if p.state is State.DEAD), key=lambda p: p.role == "rl")
    for role, message in facts.errors.items():
        culprit = next((p.name for p in dead if p.role == role), role)
        return Problem(f"{role} has failed: {message}", culprit, _how_to_go_on(facts))
    names = ", ".join(p.name for p in dead) or "rl"
    text = f"all processes are gone, and {names} without a last word: killed, perhaps for want of memory"
    return Problem(text, dead[0].name if dead else "rl", _how_to_go_on(facts))


def _how_to_go_on(facts: Facts) -> str | None:
    if not facts.checkpoints:
        return None
    step = facts.checkpoints[-1].step
    return f"checkpoint {step} is complete: the same command with `--ckpt.resume-step -1` goes on from there"


def _room(disk: Disk, saves: bool) -> Problem | None:
    need = disk.version + (disk.checkpoint if saves else 0)
    if disk.free >= max(need, _LITTLE_ROOM):
        return None
    return Problem(f"the disk has {size(disk.free)} left, and the next version and checkpoint need {size(need)}")


def _notes(facts: Facts, state: RunState, processes: Sequence[Process]) -> Iterator[str]:
    if state in (RunState.FINISHED, RunState.STOPPED):
        yield from (f"{_who(p)} left no last word when the run was over" for p in processes if p.state is State.DEAD)
    for name, why in sorted(facts.broken.items()):
        if state is RunState.RUNNING and "was not finished" in why:
            yield f"checkpoint {name} is being written, or was not finished"
        else:
            yield f"checkpoint {name} does not count: {why}"
    for one in facts.halted:
        if one.traced:
            yield f"{one.name} (pid {one.pid}, {one.command}) is held by a debugger"
    if facts.resume is not None and facts.resume.branch:
        yield f"branch {facts.resume.branch} began at step {facts.resume.step}"
    counts: dict[tuple[str, str], int] = {}
    for event in facts.events:
        if event.get("event") in _NOTABLE:
            key = str(event["event"]), str(event.get("name"))
            counts[key] = counts.get(key, 0) + 1
    for (what, name), count in counts.items():
        if what == "restarted":
            yield f"{name} was started again {count} {'time' if count == 1 else 'times'}; {_last(facts, what, name)}"


def _last(facts: Facts, what: str, name: str) -> str:
    event = next(e for e in reversed(facts.events) if e.get("event") == what and str(e.get("name")) == name)
    ago = duration(facts.now - float(event.get("time", facts.now)))
    return f"the last {ago} ago: {event.get('detail') or 'no reason'}"


def _of(role: str | None, processes: Iterable[Process]) -> list[Process]:
    return [process for process in processes if process.role == role]


def _who(process: Process) -> str:
    return f"{process.name} (pid {process.pid} on {process.host})"


def is_settled(first: Mapping[str, Beat], verdicts: Iterable[Verdict]) -> bool:
    """Whether watching on would tell nothing new: everybody has said something since, or has ended, or is gone."""
    return all(
        verdict.state in (State.ENDED, State.DEAD)
        or verdict.life is Life.STOPPED
        or (verdict.beat != first.get(verdict.name) and not _overdue(verdict))
        for verdict in verdicts
    )


def _overdue(verdict: Verdict) -> bool:
    beat = verdict.beat
    if beat is None or beat.phase_deadline_s is None:
        return False
    return beat.written - beat.phase_since > beat.phase_deadline_s
