"""Checks that a peer is alive while this process waits for its work (I7)."""

import time
from collections.abc import Callable
from types import MappingProxyType

from loguru import logger

from prime_rl.core.errors import ConfigError, RunError
from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_monitor import (
    WAIT_FOR_SLOT,
    HeartbeatMonitor,
    KernelState,
    LivenessReport,
    ProcessState,
)
from prime_rl.liveness.run_settings import ProcessSettings, RunSettings, find_difference
from prime_rl.storage.paths import RunPaths

_POLL_SECONDS = 0.5
_WITHOUT_LIMIT = (ProcessState.STUCK, ProcessState.UNREACHABLE)
"""States that end a wait immediately, or not at all."""


class PeerLost(RunError):
    """The awaited process is dead, stopped, stuck, or has ended; the message gives the duration."""


class PeerMonitor:
    """Monitors the processes of one role during a wait.

    A silent, dead or stopped process is logged after `warn_after_seconds`. It ends the wait after
    `dead_after_seconds`, which leaves torchrun, Kubernetes or a user time to restart it. A stuck process ends the wait
    immediately.

    Args:
        raises: whether a lost process ends the wait. False under `rl`, whose supervisor ends or restarts it.
        answers_requests: the processes are servers: missing heartbeats are no evidence as long as they may answer
            requests, and one server can replace another. A wait ends only when each of them is stuck, has failed or
            ended, or is gone or stopped on this node.
        settings: of this process, which those of the peers must not contradict; not checked under `rl`. The run ends
            if they do, but survives a process with other settings that starts after one with the same.
    """

    def __init__(
        self,
        paths: RunPaths,
        role: str,
        limits: HeartbeatLimits,
        raises: bool,
        answers_requests: bool = False,
        settings: RunSettings = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths, self._role, self._limits, self._raises, self._clock = paths, role, limits, raises, clock
        self._answers_requests, self._settings = answers_requests, ProcessSettings("here", settings)
        self._has_agreed = self._may_end = False
        self._refused = self._logged_queue = ""
        self._monitor = HeartbeatMonitor(paths, limits, (role,), clock)
        self._last_poll = float("-inf")
        self._reports: list[LivenessReport] = []
        self._logged: dict[str, ProcessState] = {}

    def expect_end(self) -> None:
        """Neither log nor raise a regular end from now on: the role has no work left, but files may arrive later."""
        self._may_end = True

    @property
    def queue(self) -> str:
        """Which place this run has among those that wait for a slot of the trainer; empty if it does not wait."""
        alive = (r.heartbeat.phase for r in self._reports if r.seen_alive and r.state is ProcessState.ALIVE)
        start = f"{WAIT_FOR_SLOT}: "  # an orchestrator waits in the phase without a colon
        return next((phase.removeprefix(start) for phase in alive if phase.startswith(start)), "")

    def check(self) -> bool:
        """Poll, at most twice a second; return whether the run waits for a slot. Call it repeatedly during a wait.

        Raises:
            ConfigError: a living process of the role has other settings.
            PeerLost: a process of the role is lost. A file that is older than this process and has not changed since
                is ignored, because it may belong to an earlier run.
        """
        if self._clock() - self._last_poll < _POLL_SECONDS:
            return bool(self.queue)
        seen = self.compare()
        lost = [report for report in seen if self._is_lost(report)]
        if lost and (len(lost) == len(seen) or not self._answers_requests):
            raise PeerLost(f"{lost[0]}; this process was waiting for it")
        if self.queue not in ("", self._logged_queue):
            logger.info("this run waits for a slot of the trainer: {}", self.queue)
        self._logged_queue = self.queue
        return bool(self.queue)

    def compare(self) -> list[LivenessReport]:
        """Poll, log changes and compare the settings of the living processes, unless this process runs under `rl`.

        Returns the processes that have been seen alive. Raises ConfigError as `check`.
        """
        if not self._raises:
            self.poll()
            return []
        seen = self.log_changes()
        for report in seen:
            if report.has_exited:
                continue
            peer = ProcessSettings(f"at {report.heartbeat}", report.heartbeat.settings)
            if (difference := find_difference(self._settings, peer)) is None:
                self._has_agreed = True
            elif not self._has_agreed:
                raise ConfigError(difference)
            elif difference != self._refused:
                self._refused = difference
                logger.warning("this run does not work with {}: {}", report.heartbeat, difference)
        return seen

    def poll(self) -> None:
        """Record which processes are alive, so that a later `check` can distinguish them from an earlier run's."""
        self._reports, self._last_poll = self._monitor.poll(), self._clock()

    def log_changes(self) -> list[LivenessReport]:
        """Poll and log each process whose state has changed; return those that have been seen alive."""
        self.poll()
        seen = [report for report in self._reports if report.seen_alive]
        ends = self._raises and not self._answers_requests
        until = f"; waiting for it up to {self._limits.dead_after_seconds:g} s" if ends else ""
        for report in seen:
            before, self._logged[report.name] = self._logged.get(report.name, ProcessState.ALIVE), report.state
            if report.state is before or self._is_expected(report):
                continue
            if report.state is ProcessState.ALIVE:
                logger.info("{} is alive again", report.heartbeat)
            else:
                logger.warning("{}{}", report, "" if report.state in _WITHOUT_LIMIT else until)
        return seen

    def describe(self) -> str:
        """Return the last known state of the role for an error message: process, state, phase, log."""
        self._reports = self._reports or self._monitor.poll()
        if not self._reports:
            return f"{self._paths.heartbeats_dir} has no heartbeat of {self._role}"
        worst = [report for report in self._reports if report.state is not ProcessState.ALIVE] or self._reports
        return "; ".join(map(str, worst[:2]))

    def _is_expected(self, report: LivenessReport) -> bool:
        return self._may_end and report.state is ProcessState.ENDED

    def _is_lost(self, report: LivenessReport) -> bool:
        if self._is_expected(report):
            return False
        if report.state is ProcessState.STUCK:
            return True
        may_answer = report.kernel_state in (KernelState.RUNNING, KernelState.UNKNOWN) and not report.has_exited
        if self._answers_requests and may_answer:
            return False
        answers = report.state in (ProcessState.ALIVE, ProcessState.UNREACHABLE)  # the others decide how long they wait
        return not answers and report.duration_seconds > self._limits.dead_after_seconds
