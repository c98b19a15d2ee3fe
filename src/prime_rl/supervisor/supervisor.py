"""Runs the processes of a run until the work is done, one of them cannot be restarted, or the user stops them.

    waiting --> started --> exits with 0 --> done, when all required processes have exited   (restarted if needs_rerun)
      ^           |  \
      |           |   +--> fails --> bad input, or no restart left --> all are stopped, the culprit is reported
      |           |          +--> its orphans are killed --+           an orphan that cannot be killed ends the run
      |           +--> stopped, silent or stuck --> killed --> fails   |
      +----------------------------------------------------------------+  while restarts are left

Keeps the invariants that nothing hangs and that no process outlives the run (I7).
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from prime_rl.core.errors import RunError
from prime_rl.liveness.parent_process import become_subreaper
from prime_rl.supervisor.child_processes import (
    BAD_INPUT,
    ChildProcess,
    ProcessSpec,
    describe_exit,
    find_culprit,
    kill_all,
    save_checkpoints,
    stop_all,
)
from prime_rl.supervisor.health_monitor import CHECK_INTERVAL_SECONDS, HealthMonitor
from prime_rl.supervisor.lifecycle_events import EventLog, EventName
from prime_rl.supervisor.process_tree import ProcessTree

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KILL_REASON_SECONDS = 30.0
"""How long after the kill of a descendant the failure of its parent is attributed to that kill."""


@dataclass(frozen=True, slots=True)
class SupervisorTimeouts:
    """Timeouts in seconds.

    Attributes:
        stop_seconds: for an orderly exit after SIGTERM.
        checkpoint_seconds: before that, for a checkpoint after SIGTERM to this process.
        kill_seconds: for the kernel to end killed processes; it first frees their memory, also that of the GPU.
        culprit_seconds: to find the culprit after the first failure. The clients of a server fail at once, the server
            itself needs two seconds after the death of its engine.
        exit_seconds: for the other processes that must finish, once the last one has exited.
        startup_seconds: added to `exit_seconds` for a restarted process, which first loads everything.
    """

    stop_seconds: float = 5.0
    checkpoint_seconds: float = 25.0
    kill_seconds: float = 60.0
    culprit_seconds: float = 4.0
    exit_seconds: float = 60.0
    startup_seconds: float = 240.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        culprit: the process whose failure ended the run, or of several runs one; None after success or a signal.
        code: exit code of the culprit, minus the signal's number if one killed it; None if it did not exit in time.
        reason: why the supervisor killed the culprit, if it did.
        left: process ids that could not be ended.
    """

    culprit: ProcessSpec | None = None
    code: int | None = None
    reason: str | None = None
    stopped_by: signal.Signals | None = None
    left: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the run ended without a failed process and without a signal."""
        return self.culprit is None and self.stopped_by is None


async def supervise(
    specs: Sequence[ProcessSpec],
    timeouts: SupervisorTimeouts,
    events: EventLog,
    health: HealthMonitor | None,
    keep_serving: bool = False,
) -> Outcome:
    """Start the processes, and return when the run is over and no process is left.

    Those without `start_after` start at once. `health` finds stopped, silent and stuck processes; None disables this.
    With `keep_serving`, servers stay when the work is done, until a signal arrives, which is then a success.

    Raises:
        RunError: a process cannot be started. Those already started have been stopped.
    """
    become_subreaper()
    left: list[int] = []
    async with stop_signals() as (stopped, hurry):
        run = _Supervision(specs, timeouts, events, health, stopped, keep_serving)
        try:
            outcome = await run.until_over()
            if outcome.stopped_by is signal.SIGTERM:
                await save_checkpoints(run.children, timeouts.checkpoint_seconds, hurry)
        except RunError as error:
            events.add("failed", "rl", detail=str(error))
            raise
        finally:
            run.cancel_starts()
            if run.children:
                ignored = health.process_tree.ignored if health else ()
                left = await stop_all(run.children, timeouts.stop_seconds, timeouts.kill_seconds, hurry, ignored)
    return replace(outcome, left=tuple(left))


@dataclass(slots=True)
class _PendingStart:
    """A start that has not happened yet.

    Attributes:
        reason: why it is restarted, for its log and the user; None for the first start.
        orphans: kills what the previous process left behind; returns the ids of those that still exist.
        announced: whether the user was informed that it waits for another process.
    """

    spec: ProcessSpec
    reason: str | None = None
    orphans: asyncio.Task[list[int]] | None = None
    announced: bool = False


class _Supervision:
    """The processes of one run, until it is over."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        timeouts: SupervisorTimeouts,
        events: EventLog,
        health: HealthMonitor | None,
        stopped: asyncio.Future[signal.Signals],
        keep_serving: bool = False,
    ) -> None:
        names = {spec.name for spec in specs}
        for spec in specs:
            if spec.start_after is not None and spec.start_after not in names:
                raise ValueError(f"start_after = {spec.start_after} of {spec.name} is not one of {sorted(names)}")
        self.events = events
        self._children: dict[str, ChildProcess] = {}
        self._pending = {spec.name: _PendingStart(spec) for spec in specs}
        self._timeouts, self._health, self._stopped = timeouts, health, stopped
        self._process_tree = health.process_tree if health else ProcessTree()
        self._keep_serving, self._has_finished = keep_serving, False
        self._num_restarts = dict.fromkeys(names, 0)
        self._launcher_restarts = {spec.name: spec.num_launcher_restarts() for spec in specs}
        self._earlier_launcher_restarts = dict(self._launcher_restarts)
        self._kill_reasons: dict[str, tuple[float, str]] = {}
        self._reported_exits: set[int] = set()
        self._restarted: set[int] = set()
        self._lost: dict[str, ChildProcess] = {}
        """Processes of failed runs, whose failure does not end the other runs."""
        self._next_check = time.monotonic() + CHECK_INTERVAL_SECONDS

    @property
    def children(self) -> list[ChildProcess]:
        """The latest child of each spec, including those that have exited."""
        return list(self._children.values())

    def cancel_starts(self) -> None:
        """Cancel the pending starts."""
        for start in self._pending.values():
            if start.orphans is not None:
                start.orphans.cancel()

    async def until_over(self) -> Outcome:
        """Start all processes; return when the required ones have exited, after a fatal failure, or after a signal."""
        late_since: float | None = None
        while True:
            if (failed := self._start_due()) is not None:
                return self._give_up(failed, failed.exited.result())
            await self._wait_for_change()
            if self._stopped.done():
                if self._has_finished:
                    return Outcome()
                number = self._stopped.result()
                self.events.add("finished", "rl", detail=f"stopped by {number.name}")
                return Outcome(stopped_by=number)
            for child in self.children:
                if child.exited.done() and not child.has_failed:
                    self._report_exit(child)
            is_waiting = any(start.spec.must_finish for start in self._pending.values())
            required = [c.exited for c in self.children if c.spec.must_finish and c.spec.name not in self._lost]
            if self._lost and not required and not is_waiting:
                return self._finish()  # the trainer was started by another `rl`, and continues
            has_ended = bool(required) and all(one.done() and one.result() == 0 for one in required)
            if has_ended and not (is_waiting or self._has_finished):
                self._has_finished = True
                self.events.add("finished", "rl")
                if not self._keep_serving:
                    return self._finish()
            if (outcome := await self._handle_exits()) is not None:
                return outcome
            if time.monotonic() >= self._next_check:
                if (failed := self._check_health()) is not None:
                    return self._give_up(failed, 1)
                self._next_check = time.monotonic() + CHECK_INTERVAL_SECONDS
            if (late := self._find_late()) is None:
                late_since = None
                continue
            if self._lost and all(c.spec.name in self._lost for c in self.children if c.spec.fails_alone):
                return self._finish()  # the trainer may not have had a run, after which it ends
            late_since = late_since or time.monotonic()
            extra = self._timeouts.startup_seconds if late.pid in self._restarted else 0.0
            if time.monotonic() - late_since > self._timeouts.exit_seconds + extra:
                return self._give_up(late, None)

    async def _wait_for_change(self) -> None:
        """Wait until a process exits, a signal arrives, or the next check is due."""
        watched: set[asyncio.Future[Any]] = {
            self._stopped,
            *(child.exited for child in self.children if not child.exited.done()),
            *(start.orphans for start in self._pending.values() if start.orphans is not None),
        }
        timeout = max(0.0, self._next_check - time.monotonic())
        await asyncio.wait(watched, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    def _find_late(self) -> ChildProcess | None:
        """A process that should have exited, because the last work of the run is done."""
        if any(c.spec.is_last and c.exited.done() and c.spec.name not in self._pending for c in self.children):
            return next((child for child in self.children if child.spec.must_finish and not child.exited.done()), None)
        runs = [child for child in self.children if child.spec.fails_alone]
        if runs and all(child.exited.done() and child.spec.name not in self._pending for child in runs):
            return next((c for c in self.children if c.spec.is_last and not c.spec.in_use()), None)
        return None

    def _start_due(self) -> ChildProcess | None:
        """Start what is ready to start. Returns a child whose orphans cannot be ended, if there is one."""
        for name, start in list(self._pending.items()):
            if start.orphans is not None:
                if not start.orphans.done():
                    continue
                if left := start.orphans.result():
                    child, kill_seconds = self._children[name], self._timeouts.kill_seconds
                    cause = f"{cause}; " if (cause := self._cause(child.spec)) else ""
                    survivors = f"process {', '.join(map(str, left))} still exists {kill_seconds:g} s after SIGKILL"
                    self._kill_reasons[name] = time.monotonic(), f"{cause}it is not restarted, because {survivors}"
                    return child
                start.orphans = None
            if self._must_wait(start):
                continue
            del self._pending[name]
            child = self._children[name] = ChildProcess.start(start.spec, start.reason)
            if start.reason is None:
                self._report("started", child, message=f"started {name} (pid {child.pid}), log {child.spec.log}")
            else:
                self._restarted.add(child.pid)
                self._report("restarted", child, detail=start.reason, message=f"{start.reason} (pid {child.pid})")
        return None

    def _must_wait(self, start: _PendingStart) -> bool:
        """Return whether the start must wait for `start_after`; prints the reason once."""
        other = start.spec.start_after
        if other is None:
            return False
        server = self._children.get(other)
        if server is not None and not server.exited.done() and server.spec.is_ready(server.pid):
            return False
        if not start.announced:
            start.announced = True
            self.events.print(f"{start.spec.name} starts when {other} is ready")
        return True

    async def _handle_exits(self) -> Outcome | None:
        """Prepare restarts; a failure without a restart ends the run."""
        for child in self.children:
            if not child.has_failed or child.spec.name in self._pending.keys() | self._lost.keys():
                continue
            error = child.spec.read_error()
            bad_input = BAD_INPUT in (child.exited.result(), error.code if error else None)
            if bad_input or self._restarts_left(child.spec) <= 0 or child.spec.is_over():
                self._report_exit(child)
                if child.spec.fails_alone:
                    self._lose(child)
                    continue
                others = [one for one in self.children if one.spec.name not in self._pending.keys() | self._lost.keys()]
                culprit = await find_culprit(others, self._timeouts.culprit_seconds)
                return self._give_up(culprit, culprit.exited.result())
            self._restart(child)
        for child in self.children:
            # Without a running last process the run is over, and no finished work can have been undone.
            last_runs = any(other.spec.is_last and not other.exited.done() for other in self.children)
            finished = child.exited.done() and not child.has_failed and child.spec.name not in self._pending
            if finished and last_runs and child.spec.needs_rerun():
                reason = f"{child.spec.name} is restarted: its finished work was undone by another restart"
                self._pending[child.spec.name] = self._next_start(child.spec, reason, self._restarts_left(child.spec))
        return None

    def _lose(self, child: ChildProcess) -> None:
        """End one of several runs; the others continue."""
        spec, how = child.spec, describe_exit(child.exited.result())
        self._lost[spec.name] = child
        cause = f": {cause}" if (cause := self._cause(spec)) else ""
        message = f"{spec.name} {how}{cause}; log {spec.log}"
        self._report("failed", child, code=child.exited.result(), detail=how, message=message)

    def _finish(self) -> Outcome:
        """Return the outcome of a run that is over: success, or of several runs the failure with the largest code."""
        if not self._lost:
            return Outcome()
        worst = max(self._lost.values(), key=lambda child: child.exited.result())
        return Outcome(worst.spec, worst.exited.result(), self._kill_reason(worst.spec))

    def _restarts_left(self, spec: ProcessSpec) -> int:
        """Return the remaining restarts; restarts by the launcher (torchrun) count as used."""
        by_launcher = spec.num_launcher_restarts() - self._earlier_launcher_restarts[spec.name]
        return spec.max_restarts - self._num_restarts[spec.name] - by_launcher

    def _restart(self, child: ChildProcess) -> None:
        """Kill what the child left behind, then start its spec again."""
        spec, code = child.spec, child.exited.result()
        self._report_exit(child)
        left = self._restarts_left(spec) - 1
        self._num_restarts[spec.name] += 1
        count = f"restart {spec.max_restarts - left} of {spec.max_restarts}"
        cause = f": {cause}" if (cause := self._cause(spec)) else ""
        start = self._next_start(spec, f"{spec.name} {describe_exit(code)}{cause}; {count}", left)
        orphans = kill_all(
            lambda: self._process_tree.leftovers(spec.name, self._running()), self._timeouts.kill_seconds
        )
        start.orphans = asyncio.ensure_future(orphans)
        self._pending[spec.name] = start

    @staticmethod
    def _next_start(spec: ProcessSpec, reason: str, left: int) -> _PendingStart:
        return _PendingStart(spec.restart_spec(left) if spec.restart_spec is not None else spec, reason)

    def _check_health(self) -> ChildProcess | None:
        """Kill unresponsive processes. Returns a launcher that retries although its input is bad, if there is one."""
        for one in self._health.check(self._running()) if self._health else ():
            self._kill_reasons[one.role] = time.monotonic(), one.reason
            self.events.add(
                "killed", one.name, one.pid, role=one.role, detail=one.reason, message=f"killed: {one.reason}"
            )
            with suppress(ProcessLookupError):
                os.kill(one.pid, one.kill_signal)
        for child in self.children:
            if child.exited.done():
                continue
            error = child.spec.read_error()
            if error is not None and error.code == BAD_INPUT and child.spec.max_restarts:
                return child
            self._report_launcher_restart(child)
        return None

    def _report_launcher_restart(self, child: ChildProcess) -> None:
        """Report it if the child is a launcher and has restarted its own children."""
        spec = child.spec
        if (count := spec.num_launcher_restarts()) > self._launcher_restarts[spec.name]:
            self._launcher_restarts[spec.name] = count
            cause = f": {cause}" if (cause := self._cause(spec)) else ""
            spec.error.unlink(missing_ok=True)  # a later error is a different one
            number = spec.max_restarts - self._restarts_left(spec)
            detail = f"restart {number} of {spec.max_restarts}, by its launcher{cause}"
            self._report("restarted", child, detail=detail, message=f"{spec.name}: {detail}")

    def _running(self) -> dict[int, str]:
        return {child.pid: child.spec.name for child in self.children if not child.exited.done()}

    def _kill_reason(self, spec: ProcessSpec) -> str | None:
        """Why a descendant of the process was killed a moment ago."""
        when, reason = self._kill_reasons.get(spec.name, (float("-inf"), ""))
        return reason if time.monotonic() - when < _KILL_REASON_SECONDS else None

    def _cause(self, spec: ProcessSpec) -> str | None:
        """What ended the process: the reason of a kill, or the error that it wrote."""
        error = spec.read_error()
        return self._kill_reason(spec) or (error.message if error else None)

    def _give_up(self, child: ChildProcess, code: int | None) -> Outcome:
        if child.exited.done():
            self._report_exit(child)
        self._report("failed", child, code=code, detail=describe_exit(code))
        return Outcome(child.spec, code, self._kill_reason(child.spec))

    def _report_exit(self, child: ChildProcess) -> None:
        if child.pid not in self._reported_exits:
            self._reported_exits.add(child.pid)
            self._report("ended", child, code=child.exited.result(), detail=self._cause(child.spec))

    def _report(self, event: EventName, child: ChildProcess, **fields: Any) -> None:
        self.events.add(event, child.spec.name, child.pid, role=child.spec.name, **fields)


@asynccontextmanager
async def stop_signals() -> AsyncIterator[tuple[asyncio.Future[signal.Signals], asyncio.Event]]:
    """Yield a future that the first signal resolves, and an event that each further signal sets.

    A signal that was ignored when this process started stays ignored. `nohup` ignores SIGHUP, so that the run survives
    its terminal; a shell ignores SIGINT for background jobs.
    """
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[signal.Signals] = loop.create_future()
    hurry = asyncio.Event()

    def received(number: signal.Signals) -> None:
        if stopped.done():
            hurry.set()
        else:
            stopped.set_result(number)

    handled = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, received, number)
    try:
        yield stopped, hurry
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
