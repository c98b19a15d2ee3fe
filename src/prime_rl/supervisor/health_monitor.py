"""Finds the processes of a run that are stopped, silent or stuck, so that they can be killed and restarted (I7)."""

import math
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import psutil

from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_monitor import FAILED, HeartbeatMonitor, KernelState, LivenessReport, ProcessState
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.lifecycle_events import EventLog, EventName
from prime_rl.supervisor.process_tree import Descendant, ProcessTree

CHECK_INTERVAL_SECONDS = 1.0
_REPORT_STOPPED_SECONDS = 1.0
_MAX_COUNTED_SECONDS = 2.0
"""Counted between two checks at most; a longer gap is time in which this process itself was suspended."""
_STOPPED: dict[str, EventName] = {psutil.STATUS_STOPPED: "stopped", psutil.STATUS_TRACING_STOP: "traced"}
_SILENT: dict[str, EventName] = {"silent": "silent", "dead": "silent", "unreachable": "silent", "stuck": "stuck"}


@dataclass(frozen=True, slots=True)
class UnresponsiveProcess:
    """A process to kill, because it makes no progress; the reason is a sentence that names the process.

    SIGTERM is for one that runs a command on other nodes: it ends the command there, so that it can start again.
    """

    name: str
    pid: int
    role: str
    reason: str
    kill_signal: signal.Signals = signal.SIGKILL


class StopTracker:
    """Counts for how long each descendant has been stopped."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, float], float] = {}
        self._last = math.inf

    def observe(self, members: list[Descendant], now: float) -> dict[Descendant, float]:
        """Return the seconds of each descendant that is stopped or traced; `now` in monotonic seconds."""
        passed, self._last = max(0.0, min(now - self._last, _MAX_COUNTED_SECONDS)), now
        stopped = {member: (member.pid, member.created) for member in members if member.status in _STOPPED}
        self._seconds = {key: self._seconds[key] + passed if key in self._seconds else 0.0 for key in stopped.values()}
        return {member: self._seconds[key] for member, key in stopped.items()}


class HealthMonitor:
    """Checks all descendants of `rl`, and all processes with a heartbeat.

    The kernel reports which descendants are stopped, environment workers and engines included. Heartbeats report
    whether a process makes progress. A process that is traced by a debugger is reported but not killed.

    Findings are added to `events`. `clock` returns monotonic seconds. With `spans_nodes`, the child processes of `rl`
    started those of other nodes: instead of a lost process there, its child process is killed. `runs` are the folders
    of several runs, each with the name of its orchestrator.
    """

    def __init__(
        self,
        paths: RunPaths,
        limits: HeartbeatLimits,
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
        spans_nodes: bool = False,
        runs: Mapping[str, RunPaths] = MappingProxyType({}),
    ) -> None:
        self._spans_nodes = spans_nodes
        self.process_tree = ProcessTree()
        self._limits, self._events, self._clock = limits, events, clock
        joins = any(run.root == paths.root for run in runs.values())
        self._heartbeats = HeartbeatMonitor(paths, limits, ("rl", "trainer") if joins else None)
        # The trainer's heartbeats there are of runs: they end before their process does.
        self._of_runs = {name: HeartbeatMonitor(run, limits, ("orchestrator",), clock) for name, run in runs.items()}
        self._stops = StopTracker()
        self._members: dict[tuple[int, float], Descendant] = {}
        self._seen_twice: set[tuple[int, float]] = set()
        self._children: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._last_events: dict[int | str, EventName] = {}
        """By process id for stops, by name for heartbeats."""
        self._killed: set[int] = set()

    def check(self, roles: Mapping[int, str]) -> list[UnresponsiveProcess]:
        """Return the processes to kill, each one once; to be called about once a second, with the running children."""
        members = self.process_tree.scan(roles)
        started = {role for pid, role in roles.items() if pid not in self._children}
        self._children |= roles
        reports = self._heartbeats.poll()
        for name, heartbeats in self._of_runs.items():
            reports += [
                replace(report, name=name, heartbeat=replace(report.heartbeat, name=name, role=name))
                for report in heartbeats.poll()
            ]
        if self._spans_nodes:
            stale = {v.name for v in reports if not v.is_local and _child_of(v, roles.values()) in started}
            self._heartbeats.forget(stale)
            reports = [report for report in reports if report.name not in stale]
        self._names |= {v.heartbeat.pid: v.name for v in reports if v.is_local}
        self._report_exits(members, roles)
        alive = {member.pid for member in members}
        found = [*self._find_stopped(members), *self._find_silent(reports, alive)]
        found += self._find_silent_elsewhere(reports, roles) if self._spans_nodes else []
        fresh = list({one.pid: one for one in reversed(found) if one.pid not in self._killed}.values())
        self._killed = (self._killed & alive) | {one.pid for one in fresh}
        return fresh

    def name_of(self, member: Descendant) -> str:
        """Return the name under which events report a descendant."""
        known = self._names.get(member.pid) or self._children.get(member.pid)
        return known or f"{member.role or 'orphan'}/{member.pid}"

    def _report_exits(self, members: list[Descendant], roles: Mapping[int, str]) -> None:
        """Report descendants that exited while their child process runs, except short-lived ones.

        The supervisor itself reports the exits of the child processes, with their exit codes.
        """
        before, self._members = self._members, {(m.pid, m.created): m for m in members}
        for key in before.keys() - self._members.keys():
            gone = before[key]
            if key in self._seen_twice and gone.role in roles.values() and gone.pid not in self._children:
                self._events.add("ended", self.name_of(gone), gone.pid, role=gone.role, detail=gone.command)
            self._names.pop(gone.pid, None)
            self._last_events.pop(gone.pid, None)
            self._children.pop(gone.pid, None)
        self._seen_twice = before.keys() & self._members.keys()

    def _find_stopped(self, members: list[Descendant]) -> Iterator[UnresponsiveProcess]:
        stops = self._stops.observe(members, self._clock())
        for member in members:
            name, seconds = self.name_of(member), stops.get(member)
            if seconds is None:
                self._report_change(member.pid, None, name, member.pid, member.role)
                continue
            who = f"{name} (pid {member.pid}, {member.command})"
            event, is_long = _STOPPED[member.status], seconds >= self._limits.warn_after_seconds
            if event == "traced" and is_long:
                self._report_change(member.pid, event, name, member.pid, member.role, f"{who} is traced by a debugger")
            elif event == "stopped" and seconds >= _REPORT_STOPPED_SECONDS:
                self._report_change(member.pid, event, name, member.pid, member.role, f"{who} is stopped (SIGSTOP?)")
                if is_long:
                    reason = f"{who} was stopped (SIGSTOP?) for {seconds:.0f} s"
                    yield UnresponsiveProcess(name, member.pid, member.role or "", reason)

    def _find_silent(self, reports: list[LivenessReport], descendants: set[int]) -> Iterator[UnresponsiveProcess]:
        for report in reports:
            beat = report.heartbeat
            if not report.seen_alive or report.kernel_state is KernelState.GONE:
                continue
            if beat.phase != FAILED and report.kernel_state is not KernelState.STOPPED:  # see `_find_stopped`
                event = _SILENT.get(report.state)
                self._report_change(report.name, event, report.name, beat.pid, beat.role, str(report))
            if report.is_local and beat.pid in descendants and self._is_lost(report):
                yield UnresponsiveProcess(report.name, beat.pid, beat.role, str(report))

    def _find_silent_elsewhere(
        self, reports: list[LivenessReport], roles: Mapping[int, str]
    ) -> Iterator[UnresponsiveProcess]:
        children = {role: pid for pid, role in roles.items()}
        for report in reports:
            role = _child_of(report, children)
            is_elsewhere = report.seen_alive and report.kernel_state is KernelState.UNKNOWN
            if is_elsewhere and role is not None and self._is_lost(report):
                yield UnresponsiveProcess(report.name, children[role], role, str(report), signal.SIGTERM)

    def _is_lost(self, report: LivenessReport) -> bool:
        """Whether a process makes no more progress. One that wrote its last heartbeat gets time to exit."""
        if report.kernel_state is KernelState.TRACED:
            return False
        if report.has_exited:
            return report.duration_seconds > self._limits.dead_after_seconds
        return report.state in (ProcessState.STUCK, ProcessState.DEAD)

    def _report_change(
        self, key: int | str, event: EventName | None, name: str, pid: int, role: str | None, detail: str = ""
    ) -> None:
        """Report a state when it begins, and its end (None) as "resumed"."""
        before = self._last_events.get(key)
        if event is None and before is not None:
            del self._last_events[key]
            message = f"{name} (pid {pid}) continues"
            self._events.add("resumed", name, pid, role=role, detail=f"was {before}", message=message)
        elif event is not None and event != before:
            self._last_events[key] = event
            self._events.add(event, name, pid, role=role, detail=detail, message=f"warning: {detail}")


def _child_of(report: LivenessReport, children: Collection[str]) -> str | None:
    """The name of the child process of `rl` that started a process on another node."""
    return next((name for name in (report.name, report.heartbeat.role) if name in children), None)
