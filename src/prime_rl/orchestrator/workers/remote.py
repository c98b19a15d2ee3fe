"""Main's view of one worker: groups go in, rollouts or named failures come out, and its death is noticed.

Every group that was given to a worker ends: with its answer, by cancellation, or with `WorkerDied`.
"""

import asyncio
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.errors import ConfigError, RunError
from prime_rl.orchestrator.engine import EngineError, EngineLost
from prime_rl.orchestrator.workers.failures import EnvironmentFailed, SampleTooLong
from prime_rl.orchestrator.workers.host import WorkerHost, WorkerProcess
from prime_rl.orchestrator.workers.protocol import (
    Cancel,
    Failed,
    Frames,
    Load,
    Order,
    Play,
    Played,
    Ready,
    Report,
    Unloadable,
    decode_report,
    frame,
)
from prime_rl.types import Rollout

_DRAIN_S = 1.0
"""Longest wait for the rest of what a dead worker had sent; longer only if a stray child of it holds the line open."""


_KILL_S = 5.0
"""Longest wait for the end of a worker that is killed; longer only if the process that forked it is stopped itself."""

_STALLED_S = 1.0
"""A loop that has not beaten for so long is blocked: a group that is overdue then may be none the worse for it."""


class WorkerDied(Exception):
    """A worker ended before it had answered. The message says how.

    Attributes:
        culprit: the request whose code it ran then; None if that is unknown.
    """

    def __init__(self, message: str, culprit: int | None) -> None:
        super().__init__(message)
        self.culprit = culprit


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a worker may keep main waiting, seconds.

    Attributes:
        start_s: to load its environment.
        group_s: to answer a group; None sets no limit.
        silence_s: between two beats of its event loop.
    """

    start_s: float
    group_s: float | None
    silence_s: float


class RemoteWorker:
    """One started worker.

    Attributes:
        examples: how many examples its environment has.
        in_flight: rollouts that it is playing.
        died: how it ended, once it has.
    """

    def __init__(self, host: WorkerHost, process: WorkerProcess, patience: Patience) -> None:
        """Wrap a started process; `start` does all of it."""
        self.examples = 0
        self.in_flight = 0
        loop = asyncio.get_running_loop()
        self.died: asyncio.Future[WorkerDied] = loop.create_future()
        self._host = host
        self._process = process
        self._patience = patience
        self._ready: asyncio.Future[Ready | Unloadable] = loop.create_future()
        self._drained = asyncio.Event()
        self._pending: dict[int, asyncio.Future[Played | Failed]] = {}
        self._deadlines: dict[int, float] = {}
        self._sentence: tuple[str, int | None] | None = None
        self._beats, self._heard = 0, time.monotonic()
        self._transport: asyncio.WriteTransport | None = None
        self._mourner = asyncio.create_task(self._mourn())

    @classmethod
    async def start(cls, host: WorkerHost, load: Load, log: Path | None, patience: Patience) -> "RemoteWorker":
        """Start a worker and have it load its environment.

        Raises:
            ConfigError: the environment cannot be loaded, by fault of the input.
            RunError: the worker died, or took too long.
        """
        limit = asyncio.timeout(patience.start_s)
        worker: RemoteWorker | None = None
        try:
            async with limit:
                worker = cls(host, await host.start(log), patience)
                await worker._open(load)
                waits: set[asyncio.Future[Any]] = {worker._ready, worker.died}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except BaseException as error:
            if worker is not None:
                await worker.close(0)
            if not isinstance(error, TimeoutError) or not limit.expired():
                raise
            what = "did not load" if worker is not None else "got no worker from the process that forks them"
            raise RunError(f"{what} within {patience.start_s:.0f} s (env.start_timeout){_see(log)}") from None
        if not worker._ready.done():
            raise RunError(f"does not load: its worker {worker.died.result()}{_see(log)}")
        answer = worker._ready.result()
        if isinstance(answer, Unloadable):
            await worker.close(0)
            raise ConfigError(answer.message)
        worker.examples = answer.examples
        worker._beats, worker._heard = -1, time.monotonic()
        host.preload(answer.adapter)
        return worker

    async def play(self, play: Play) -> list[Rollout]:
        """Have a group played; cancel this to cancel the group.

        Raises:
            WorkerDied: the worker ended first; nothing is known of the group.
            EnvironmentFailed, SampleTooLong, EngineLost, EngineError: as the worker found.
        """
        if self.died.done():
            raise self._death()
        answer: asyncio.Future[Played | Failed] = asyncio.get_running_loop().create_future()
        self._pending[play.request] = answer
        if self._patience.group_s is not None:
            self._deadlines[play.request] = time.monotonic() + self._patience.group_s
        self.in_flight += play.count
        self._send(play)
        try:
            report = await answer
        except asyncio.CancelledError:
            self._send(Cancel(play.request))
            raise
        finally:
            self.in_flight -= play.count
            self._pending.pop(play.request, None)
            self._deadlines.pop(play.request, None)
        if isinstance(report, Played):
            return report.unpack()
        raise _error(report)

    def check(self) -> None:
        """Kill the worker if its loop has stopped, or if a group that should have ended long ago has not."""
        now = time.monotonic()
        if (beats := self._process.box.beats) != self._beats:
            self._beats, self._heard = beats, now
        silence = now - self._heard
        if self._sentence is not None or self.died.done():
            return
        overdue = next((request for request, deadline in self._deadlines.items() if now > deadline), None)
        if silence > self._patience.silence_s or (overdue is not None and silence > _STALLED_S):
            self._kill(f"was killed: it had been blocked for {silence:.1f} s", self._process.box.playing)
        elif overdue is not None:
            limit = self._patience.group_s
            self._kill(f"was killed: a group did not end within {limit:.1f} s, nor when it was told to", overdue)

    async def close(self, grace_s: float) -> None:
        """Hang up, and kill the worker if it is still there after `grace_s` seconds."""
        if self._transport is not None:
            self._transport.close()
        else:
            self._process.connection.close()
        if grace_s > 0:
            await asyncio.wait({self.died}, timeout=grace_s)
        self._host.kill(self._process)
        await asyncio.wait({self.died}, timeout=_KILL_S)

    async def _open(self, load: Load) -> None:
        self._transport, _ = await asyncio.get_running_loop().create_unix_connection(
            lambda: Frames(self._receive, self._drained.set), sock=self._process.connection
        )
        self._send(load)

    def _send(self, order: Order) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(order))

    def _receive(self, body: bytes) -> None:
        report: Report = decode_report(body)
        match report:
            case Ready() | Unloadable():
                self._ready.set_result(report)
            case Played() | Failed():
                answer = self._pending.get(report.request)
                if answer is not None and not answer.done():  # else it has just been cancelled
                    answer.set_result(report)

    def _kill(self, reason: str, culprit: int | None) -> None:
        self._sentence = (reason, culprit)
        self._host.kill(self._process)

    async def _mourn(self) -> None:
        """Wait for the end of the process; then end whatever still waits for it."""
        gone = asyncio.create_task(self._hear_the_end())
        status = await asyncio.shield(self._process.ended)
        gone.cancel()
        if self._transport is not None:
            with_rest = asyncio.timeout(_DRAIN_S)
            try:
                async with with_rest:
                    await self._drained.wait()
            except TimeoutError:
                self._transport.abort()
        reason, culprit = self._sentence or (_ending(status), self._process.box.playing)
        self.died.set_result(WorkerDied(reason, culprit))
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self._death())

    async def _hear_the_end(self) -> None:
        """A worker that closes its line is of no use any more, whatever it still does."""
        await self._drained.wait()
        await asyncio.wait({self._process.ended}, timeout=_DRAIN_S)
        self._host.kill(self._process)

    def _death(self) -> WorkerDied:
        """Return an exception of its own for each who waits: a raised one carries a traceback."""
        death = self.died.result()
        return WorkerDied(str(death), death.culprit)


def _error(failed: Failed) -> Exception:
    match failed.kind:
        case "environment":
            return EnvironmentFailed(failed.message)
        case "too_long":
            return SampleTooLong(failed.message)
        case "engine_lost":
            return EngineLost(failed.message)
        case "engine_error":
            return EngineError(failed.message, failed.status, late=failed.late)
        case "defect":
            return RuntimeError(f"an environment worker failed by a defect of its own: {failed.message}")


def _ending(status: int) -> str:
    if status >= 0:
        return f"exited with code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name} (signal {-status})"
    except ValueError:
        return f"was killed by signal {-status}"


def _see(log: Path | None) -> str:
    return f"; see {log}" if log is not None else ""
