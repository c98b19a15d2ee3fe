"""I7 no hang: a process that is stopped, silent or stuck is named, and then killed, so that its end can be dealt with.

Two sources, once a second. The kernel knows of every descendant, environment workers and engines included, whether it
is stopped. Heartbeats tell whether those that have one go on with their work. Time that this process has slept itself
is counted against nobody. A process in the hands of a debugger is reported and left alone.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from prime_rl.run.heartbeat import FAILED, Life, Limits, State, Verdict, Watch
from prime_rl.run.paths import RunPaths
from prime_rl.supervisor.events import Event, Events
from prime_rl.supervisor.family import Family, Member

LOOK_S = 1.0
"""Between two looks."""
_REPORT_STOPPED_S = 1.0
_AT_MOST_S = 2.0
_STOPPED: dict[str, Event] = {psutil.STATUS_STOPPED: "stopped", psutil.STATUS_TRACING_STOP: "traced"}
_SILENT: dict[State, Event] = {State.SILENT: "silent", State.DEAD: "silent", State.STUCK: "stuck"}


@dataclass(frozen=True, slots=True)
class Condemned:
    """A process that has to be killed, since it does nothing any more.

    Attributes:
        name: what it is called in events.
        pid: its process id.
        role: that it belongs to.
        why: who it is and what is wrong, as the subject and verb of a sentence.
    """

    name: str
    pid: int
    role: str
    why: str


class Stops:
    """Counts for how long each descendant has been stopped. Pure: clock and states are given."""

    def __init__(self) -> None:
        """Nobody is stopped yet."""
        self._for_s: dict[tuple[int, float], float] = {}
        self._looked: float | None = None

    def observe(self, members: list[Member], now: float) -> dict[Member, float]:
        """Look once.

        Args:
            members: everybody who is alive.
            now: monotonic seconds.

        Returns:
            Seconds for each who is stopped, or held by a debugger.
        """
        passed = 0.0 if self._looked is None else min(now - self._looked, _AT_MOST_S)
        self._looked = now
        stopped = {member: (member.pid, member.created) for member in members if member.status in _STOPPED}
        self._for_s = {key: self._for_s[key] + passed if key in self._for_s else 0.0 for key in stopped.values()}
        return {member: self._for_s[key] for member, key in stopped.items()}


class Lookout:
    """Looks at all processes of a run that `rl` has started.

    Args:
        paths: of the run.
        limits: when a process is silent, and when dead.
        events: takes down what is seen.
        clock: monotonic seconds.
    """

    def __init__(
        self, paths: RunPaths, limits: Limits, events: Events, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.family = Family()
        self._limits, self._events, self._clock = limits, events, clock
        self._watch = Watch(paths, limits)
        self._stops = Stops()
        self._members: dict[tuple[int, float], Member] = {}
        self._lasting: set[tuple[int, float]] = set()
        self._children: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._stop_of: dict[int, Event] = {}
        self._silence_of: dict[int, Event] = {}
        self._condemned: set[int] = set()

    def look(self, roles: Mapping[int, str]) -> list[Condemned]:
        """Look around; call it about once a second.

        Args:
            roles: process id of each child that has not ended -> its role.

        Returns:
            Whom to kill; each is named once.
        """
        members = self.family.look(roles)
        self._children |= roles
        verdicts = self._watch.look()
        self._names |= {v.beat.pid: v.name for v in verdicts if v.beat is not None and v.life is not Life.GONE}
        self._report_ends(members, roles)
        alive = {member.pid for member in members}
        found = [*self._stopped(members), *self._silent(verdicts, alive)]
        fresh = [one for one in found if one.pid not in self._condemned]
        self._condemned = (self._condemned & alive) | {one.pid for one in fresh}
        return fresh

    def name_of(self, member: Member) -> str:
        """What a descendant is called in events."""
        return self._names.get(member.pid) or self._children.get(member.pid) or member.name

    def _report_ends(self, members: list[Member], roles: Mapping[int, str]) -> None:
        """Report descendants that have ended while their role goes on; those that lived for a moment are left out.

        How the roles' own children have ended is known better by whom they belong to.
        """
        before, self._members = self._members, {(m.pid, m.created): m for m in members}
        for key in before.keys() - self._members.keys():
            ended = before[key]
            if key in self._lasting and ended.role in roles.values() and ended.pid not in self._children:
                self._events.add("ended", self.name_of(ended), ended.pid, role=ended.role, detail=ended.command)
            self._names.pop(ended.pid, None)
            self._stop_of.pop(ended.pid, None)
            self._children.pop(ended.pid, None)
        self._lasting = before.keys() & self._members.keys()

    def _stopped(self, members: list[Member]) -> list[Condemned]:
        found = []
        stops = self._stops.observe(members, self._clock())
        for member in members:
            seconds, name = stops.get(member), self.name_of(member)
            who = f"{name} (pid {member.pid}, {member.command})"
            if seconds is None:
                self._report(self._stop_of, None, name, member.pid, member.role, who)
            elif _STOPPED[member.status] == "traced":
                if seconds >= self._limits.silence_s:
                    self._report(self._stop_of, "traced", name, member.pid, member.role, f"{who} is held by a debugger")
            elif seconds >= _REPORT_STOPPED_S:
                self._report(self._stop_of, "stopped", name, member.pid, member.role, f"{who} is stopped (SIGSTOP?)")
                if seconds >= self._limits.silence_s:
                    why = f"{who} was stopped (SIGSTOP?) for {seconds:.0f} s"
                    found.append(Condemned(name, member.pid, member.role or "", why))
        return found

    def _silent(self, verdicts: list[Verdict], descendants: set[int]) -> list[Condemned]:
        found = []
        for verdict in verdicts:
            beat = verdict.beat
            if beat is None or not verdict.seen or verdict.life is Life.GONE:
                continue
            if beat.phase != FAILED and verdict.life is not Life.STOPPED:  # the kernel has told of a stop
                state = _SILENT.get(verdict.state)
                self._report(self._silence_of, state, verdict.name, beat.pid, beat.role, str(verdict))
            if beat.pid in descendants and self._is_lost(verdict):
                found.append(Condemned(verdict.name, beat.pid, beat.role, str(verdict)))
        return found

    def _is_lost(self, verdict: Verdict) -> bool:
        """Whether it can be of no use any more. One that has said its last word gets time for its exit."""
        if verdict.life is Life.TRACED:
            return False
        if verdict.state is State.ENDED or (verdict.beat is not None and verdict.beat.phase == FAILED):
            return verdict.for_s > self._limits.timeout_s
        return verdict.state in (State.STUCK, State.DEAD)

    def _report(
        self, known: dict[int, Event], state: Event | None, name: str, pid: int, role: str | None, detail: str
    ) -> None:
        """Report a state when it begins, and when it is over (None)."""
        before = known.get(pid)
        if state == before:
            return
        if state is None:
            del known[pid]
            self._events.add("resumed", name, pid, role=role, detail=f"was {before}", say=f"{name} (pid {pid}) goes on")
        else:
            known[pid] = state
            self._events.add(state, name, pid, role=role, detail=detail, say=f"warning: {detail}")


def kill(pid: int) -> None:
    """Kill a descendant, which may have ended meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
