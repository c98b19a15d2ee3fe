"""The orchestrator's side of one worker: sends groups, receives rollouts or failures, detects the worker's death.

Every group of a worker ends: with its result, by cancellation, or with `WorkerDied`.
"""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.os_errors import signal_name
from prime_rl.core.types import Rollout
from prime_rl.rollouts.workers import protocol
from prime_rl.rollouts.workers.protocol import DiscardedWork, RolloutSeconds
from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher, WorkerProcess

_DRAIN_SECONDS = 5.0
"""Maximum wait for data that a dead worker has sent; a child process may keep its connection open."""

_KILL_SECONDS = 5.0
"""Maximum wait for the exit of a killed worker; longer only if the fork server is suspended."""

_BLOCKED_SECONDS = 5.0
"""A closing worker without a beat for so long is blocked, or its event loop has ended and its process has not."""

_CHECK_SECONDS = 0.25


class WorkerDied(Exception):
    """A worker died before it had answered. The message describes its end.

    Attributes:
        culprit: the request whose code ran at that time; None if unknown.
        blocked: it was killed because the environment blocked its event loop.
        num_groups: groups that it ran, which run again.
        num_rollouts: their rollouts.
    """

    def __init__(
        self, message: str, culprit: int | None, blocked: bool = False, num_groups: int = 0, num_rollouts: int = 0
    ) -> None:
        super().__init__(message)
        self.culprit, self.blocked = culprit, blocked
        self.num_groups, self.num_rollouts = num_groups, num_rollouts


class WorkerHandle:
    """One started worker.

    Attributes:
        environment: what it has loaded; without examples before.
        in_flight: number of running rollouts.
        died: set when it has died.
        outgrown: set when it has more than `env.max_memory_gib` in memory.
    """

    def __init__(
        self,
        launcher: WorkerLauncher,
        process: WorkerProcess,
        config: EnvConfig,
        discarded: DiscardedWork,
        seconds: RolloutSeconds,
        on_warning: Callable[[str], None],
    ) -> None:
        """Wrap a started process; see `start`."""
        self._discarded, self._seconds = discarded, seconds
        self._reported = 0
        self.environment = protocol.EnvironmentReady(0, "", "none")
        self.in_flight = 0
        loop = asyncio.get_running_loop()
        self.died: asyncio.Future[WorkerDied] = loop.create_future()
        self.outgrown: asyncio.Future[None] = loop.create_future()
        self._launcher = launcher
        self._process = process
        self._silence_seconds = config.silence_timeout_seconds
        if config.timeout_seconds is not None:
            self._silence_seconds = min(self._silence_seconds, config.timeout_seconds + config.cleanup_seconds)
        self._max_bytes = (config.max_memory_gib or math.inf) * 2**30
        self._on_warning = on_warning
        self._ready: asyncio.Future[protocol.EnvironmentReady | protocol.EnvironmentUnloadable] = loop.create_future()
        self._drained = asyncio.Event()
        self._pending: dict[int, asyncio.Future[protocol.GroupFinished | protocol.GroupFailed]] = {}
        self._on_scoring: dict[int, Callable[[], None]] = {}
        self._rollouts: dict[int, int] = {}
        """Number of rollouts of each group without a report."""
        self._kill_reason: tuple[str, int | None] | None = None
        self._is_blocked = False
        self._beats, self._last_beats = [0, 0], [time.monotonic()] * 2
        self._transport: asyncio.WriteTransport | None = None
        self._disconnect_task = asyncio.create_task(self._await_disconnect())
        self._exit_task = asyncio.create_task(self._await_exit())

    @classmethod
    async def start(
        cls,
        launcher: WorkerLauncher,
        load: protocol.LoadEnvironment,
        log: Path | None,
        discarded: DiscardedWork,
        seconds: RolloutSeconds,
        on_warning: Callable[[str], None],
    ) -> "WorkerHandle":
        """Start a worker that loads an environment and writes its output to `log`.

        `discarded` counts the discarded work of its groups, `seconds` the time of the others; `on_warning` gets its
        warnings, now and later.

        Raises:
            ConfigError: the environment cannot be loaded because of the configuration.
            RunError: the worker died, or took too long.
        """
        hint = f"; see {log}" if log is not None else ""
        start_seconds = load.env.start_timeout_seconds
        worker: WorkerHandle | None = None
        try:
            async with asyncio.timeout(start_seconds):
                process = await launcher.start(log, load.env.interpreter)
                worker = cls(launcher, process, load.env, discarded, seconds, on_warning)
                worker._transport, _ = await asyncio.get_running_loop().create_unix_connection(
                    partial(protocol.Frames, worker._receive, worker._drained.set), sock=worker._process.connection
                )
                worker._send(load)
                waits: set[asyncio.Future[Any]] = {worker._ready, worker.died}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not worker._ready.done():
                raise RunError(f"does not load: its worker {worker.died.result()}{hint}")
            answer = worker._ready.result()
            if isinstance(answer, protocol.EnvironmentUnloadable):
                raise ConfigError(answer.message)
            worker.environment = answer
            worker._last_beats = [time.monotonic()] * 2
            launcher.preload(answer.backend)
            return worker
        except TimeoutError:
            what = "did not load" if worker is not None else "got no worker from the fork server"
            raise RunError(f"{what} within {start_seconds:.0f} s (env.start_timeout_seconds){hint}") from None
        finally:
            if worker is not None and not worker.environment.examples:
                await worker.close(0)

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def memory_bytes(self) -> int:
        """Return the resident memory of the worker, without that of its child processes; 0 if it has exited.

        If the environment has an interpreter of its own, its process is included.
        """
        size = 0
        for pid in filter(None, (self.pid, self._process.crash_record.other_pid)):
            with suppress(psutil.Error):
                size += int(psutil.Process(pid).memory_info().rss)
        return size

    async def run_group(self, group: protocol.RunGroup, on_scoring: Callable[[], None] = lambda: None) -> list[Rollout]:
        """Run a group; `on_scoring` is called when its scoring starts. Cancelling this cancels it in the worker.

        Raises:
            WorkerDied: the worker died first.
            EnvironmentFailed, SampleTooLong, UnsupportedEnvironment, InferenceServerLost, InferenceError: raised in
                the worker.
        """
        if self.died.done():
            raise self._death()
        answer: asyncio.Future[protocol.GroupFinished | protocol.GroupFailed] = (
            asyncio.get_running_loop().create_future()
        )
        self._pending[group.request], self._on_scoring[group.request] = answer, on_scoring
        self.in_flight += group.count
        self._rollouts[group.request] = group.count
        self._send(group)
        try:
            report = await answer
        finally:
            if answer.cancelled():
                self._send(protocol.CancelGroup(group.request))
            self.in_flight -= group.count
            self._pending.pop(group.request, None)
            self._on_scoring.pop(group.request, None)
        if isinstance(report, protocol.GroupFailed):
            raise report.exception()
        rollouts = [*report.rollouts, *report.conversations]
        self._seconds.add(len(rollouts), report.seconds)
        return rollouts

    def check(self) -> None:
        """Kill the worker if its event loop is blocked; set `outgrown` if it is too large."""
        if self._max_bytes < math.inf and self.memory_bytes() > self._max_bytes and not self.outgrown.done():
            self.outgrown.set_result(None)
        silence_seconds = self._measure_silence()
        if self._kill_reason is None and not self.died.done() and silence_seconds > self._silence_seconds:
            reason = f"was killed: its event loop was blocked for {silence_seconds:.1f} s"
            self._is_blocked = True
            self._kill(reason, self._process.crash_record.running_request)

    def _measure_silence(self) -> float:
        """Return the seconds since the last new beat of the worker's event loop, or of that of the environment."""
        now, record = time.monotonic(), self._process.crash_record
        for number, beats in enumerate((record.beats, record.other_beats or record.beats)):
            if beats != self._beats[number]:
                self._beats[number], self._last_beats[number] = beats, now
        return now - min(self._last_beats)

    async def close(self, grace_seconds: float) -> None:
        """Disconnect, and kill the worker if it has not exited after `grace_seconds` seconds.

        Meanwhile its groups are cancelled and clean up. A worker with a blocked event loop is killed earlier.
        """
        self._disconnect_task.cancel()
        if self._transport is not None:
            self._transport.close()
        else:
            self._process.connection.close()
        self._last_beats = [time.monotonic()] * 2
        deadline = self._last_beats[0] + grace_seconds
        while not self.died.done() and time.monotonic() < deadline and self._measure_silence() < _BLOCKED_SECONDS:
            await asyncio.wait({self.died}, timeout=min(_CHECK_SECONDS, grace_seconds))
        self._launcher.kill(self._process)
        await asyncio.wait({self.died}, timeout=_KILL_SECONDS)

    def _send(self, order: protocol.WorkerCommand) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(protocol.frame(order))

    def _receive(self, body: bytes) -> None:
        report: protocol.WorkerReport = protocol.decode_report(body)
        match report:
            case protocol.EnvironmentReady() | protocol.EnvironmentUnloadable():
                self._ready.set_result(report)
            case protocol.EnvironmentWarning(message):
                self._on_warning(message)
            case protocol.ScoringStarted(request):
                self._on_scoring.get(request, lambda: None)()
            case protocol.RolloutStuck(request):
                if request in self._pending and self._kill_reason is None:
                    limits = "env.timeout_seconds, env.cleanup_seconds"
                    reason = f"a rollout did not end in time ({limits}), nor after it was cancelled"
                    self._kill(f"was killed: {reason}", request)
            case protocol.GroupFinished() | protocol.GroupFailed():
                self._rollouts.pop(report.request, None)
                self._reported += report.sampled
                for reason, (rollouts, tokens) in report.discarded.items():
                    self._discarded.add(reason, rollouts, tokens)
                answer = self._pending.get(report.request)
                if answer is not None and not answer.done():
                    answer.set_result(report)
                elif isinstance(report, protocol.GroupFinished):  # the group was cancelled just before
                    unused = report.sampled - sum(tokens for _, tokens in report.discarded.values())
                    self._discarded.add("cancelled", len(report.rollouts) + len(report.conversations), unused)

    def _kill(self, reason: str, culprit: int | None) -> None:
        self._kill_reason = (reason, culprit)
        self._launcher.kill(self._process)

    async def _await_exit(self) -> None:
        """Wait for the exit of the process, then fail its groups."""
        status = await asyncio.shield(self._process.ended)
        self._disconnect_task.cancel()
        if self._transport is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), _DRAIN_SECONDS)
            self._transport.abort()
        record = self._process.crash_record
        exit_reason = f"exited with code {status}"
        if status < 0:
            exit_reason = f"was killed by {signal_name(-status)} (signal {-status})"
        reason, culprit = self._kill_reason or (exit_reason, record.running_request)
        self._discarded.add("replayed", sum(self._rollouts.values()), record.sampled - self._reported)
        lost = len(self._rollouts), sum(self._rollouts.values())
        self.died.set_result(WorkerDied(reason, culprit, self._is_blocked, *lost))
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self._death())

    async def _await_disconnect(self) -> None:
        """Kill a worker that has closed its connection and does not exit."""
        await self._drained.wait()
        await asyncio.wait({self._process.ended}, timeout=_DRAIN_SECONDS)
        self._launcher.kill(self._process)

    def _death(self) -> WorkerDied:
        """Return a new exception for each group, because raising one adds a traceback to it."""
        death = self.died.result()
        return WorkerDied(str(death), death.culprit)
