"""The waits of the orchestrator: each ends after progress, at a deadline, or when a peer is lost (I7).

Many events wake the loop without progress. So the deadline of `ProgressWatchdog` counts from the last progress: a group
ended, a batch shipped, or a version was switched to.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from prime_rl.core.errors import ConfigError, RunError
from prime_rl.liveness.heartbeat_monitor import WAIT_FOR_SLOT
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.peer_monitor import PeerMonitor
from prime_rl.storage.paths import RUN_FOLDER, RunPaths
from prime_rl.storage.wait_for import run_in_daemon_thread, watch_directory

TRAINER, INFERENCE, SUPERVISOR = "trainer", "inference", "rl"
_CHECK_INTERVAL_SECONDS = 1.0
_MIN_CHECK_INTERVAL_SECONDS = 0.5
"""Events may end a hundred waits per second; each check starts a thread and reads a file."""


async def pause(stop: asyncio.Event, seconds: float | None) -> None:
    """Return after `seconds` (None: never), or as soon as `stop` is set.

    `asyncio.wait_for` may swallow a cancellation in 3.11.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


@asynccontextmanager
async def deadline_scope(
    error: Callable[[], Exception], seconds: float | None = None
) -> AsyncIterator[asyncio.Timeout]:
    """Raise `error()` from the block at the deadline of the yielded timeout, which others may reschedule."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield scope
    except TimeoutError:
        if not scope.expired():
            raise
        raise error() from None


async def end_tasks(*tasks: "asyncio.Future[Any] | None") -> None:
    """Cancel the tasks that are not done, and wait for them."""
    running = [task for task in tasks if task is not None and not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


class ProgressWatchdog:
    """Waits for a peer, at most `timeout_seconds` without progress, and reports the wait in the heartbeat."""

    def __init__(self, heartbeat: HeartbeatWriter, peers: Mapping[str, PeerMonitor], timeout_seconds: float) -> None:
        self._heartbeat, self._peers, self._timeout_seconds = heartbeat, peers, timeout_seconds
        self._check: asyncio.Task[bool] | None = None
        self._checked_at: dict[str, float] = {}
        self._progress_token: Hashable = None
        self._since = time.monotonic()

    async def _check_peer(self, role: str) -> None:
        """Raise PeerLost if a role is lost, unless it was checked just before. Waiting for a slot counts as progress.

        A file system that hangs delays the check, but not the deadline.
        """
        if self._check is None:
            now = time.monotonic()
            if now - self._checked_at.get(role, -math.inf) < _MIN_CHECK_INTERVAL_SECONDS:
                return
            self._checked_at[role] = now
            self._check = asyncio.create_task(run_in_daemon_thread(self._peers[role].check))
        await asyncio.wait({self._check}, timeout=_CHECK_INTERVAL_SECONDS)
        if self._check.done():
            check, self._check = self._check, None
            if check.result():
                self._since = time.monotonic()
                self._heartbeat.advance()

    async def wait_for_slot(self) -> None:
        """Return when the trainer has a slot for this run, or does not say that it has none."""
        self._heartbeat.enter(WAIT_FOR_SLOT, waiting_for=TRAINER)
        await self._check_peer(TRAINER)
        while self._peers[TRAINER].queue:
            await asyncio.sleep(_CHECK_INTERVAL_SECONDS)
            await self._check_peer(TRAINER)

    async def start(self, work: Coroutine[Any, Any, None], role: str) -> None:
        """Run `work`, which waits for the start of `role`; raise PeerLost if `role` is lost meanwhile."""
        self._heartbeat.enter(f"wait for {role}", waiting_for=role)
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_CHECK_INTERVAL_SECONDS)
                await self._check_peer(role)
        finally:
            await end_tasks(task)
        await task

    async def wait(
        self,
        wake: asyncio.Event,
        progress_token: Hashable,
        phase: str,
        role: str,
        waiting_for: str,
        unblock: Callable[[float], bool] = lambda timeout_seconds: False,
        *,
        step: int | None = None,
        version: int | None = None,
        on_wait: Callable[[float], None] = lambda waited_seconds: None,
    ) -> None:
        """Wait until `wake` is set; raise RunError without progress for `timeout_seconds`, PeerLost if `role` is lost.

        Args:
            wake: set by events.
            progress_token: changes whenever progress was made.
            phase: for the heartbeat, such as "wait for version 3".
            role: the peer.
            waiting_for: the event, for the error.
            unblock: called with `timeout_seconds` at the deadline; the wait continues if it returns True.
            step: of the batch, for the timeline.
            version: that is waited for, for the timeline.
            on_wait: called about once a second with the seconds without progress.
        """
        if progress_token != self._progress_token:
            self._progress_token, self._since = progress_token, time.monotonic()
            self._heartbeat.advance()
        self._heartbeat.enter(phase, self._timeout_seconds, role, step=step, version=version)
        while not wake.is_set():
            await self._check_peer(role)
            on_wait(time.monotonic() - self._since)
            left_seconds = self._since + self._timeout_seconds - time.monotonic()
            if left_seconds <= 0 and unblock(self._timeout_seconds):
                self._since, left_seconds = time.monotonic(), self._timeout_seconds
            elif left_seconds <= 0:
                raise RunError(
                    f"nothing happened for {self._timeout_seconds:.0f} s (wait_timeout_seconds); "
                    f"waiting for {waiting_for}; {self._peers[role].describe()}"
                )
            await pause(wake, min(left_seconds, _CHECK_INTERVAL_SECONDS))


async def watch_supervisor(supervisor: PeerMonitor) -> None:
    """Log when the supervisor `rl` stops writing heartbeats; until cancelled."""
    while True:
        await run_in_daemon_thread(supervisor.log_changes)
        await asyncio.sleep(_CHECK_INTERVAL_SECONDS)


def raise_if_excluded(paths: RunPaths) -> None:
    """Raise ConfigError if the trainer of several runs refuses this run, RunError if the run is evicted or removed."""
    if not RUN_FOLDER.fullmatch(paths.root.name):
        return
    for file, error in ((paths.refused, ConfigError), (paths.evicted, RunError)):
        with suppress(OSError):  # there is none, or the file system fails temporarily
            raise error(file.read_text().strip())
    with suppress(OSError):
        try:
            (announcement := paths.config("orchestrator")).stat()
        except FileNotFoundError:
            raise RunError(f"{announcement} was removed, so this run is over") from None


async def unless_excluded(work: Coroutine[Any, Any, None], paths: RunPaths) -> None:
    """Run `work`; of one of several runs, cancel it as soon as `raise_if_excluded` raises.

    A hanging file system does not delay the end of `work`.
    """
    if not RUN_FOLDER.fullmatch(paths.root.name):
        await work
        return

    async def watch() -> None:
        async for _ in watch_directory(paths.refused.parent, asyncio.Event()):
            await run_in_daemon_thread(partial(raise_if_excluded, paths))

    task, watching = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait({task, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            watching.result()
    finally:
        await end_tasks(task, watching)
    await task
