"""Ends each wait of the orchestrator: after progress, at the deadline, or when a peer is lost (I7).

Many events wake the loop without progress. So the deadline counts from the last progress: a group ended, a batch
shipped, or a version was switched to.
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Hashable, Mapping
from typing import Any

from prime_rl.core.daemon_futures import run_in_daemon_thread
from prime_rl.core.errors import RunError
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.peer_monitor import PeerMonitor
from prime_rl.orchestrator.asyncio_utils import end_tasks, pause

TRAINER, INFERENCE, SUPERVISOR = "trainer", "inference", "rl"
_CHECK_INTERVAL_S = 1.0
_MIN_CHECK_INTERVAL_S = 0.5
"""Events may end a hundred waits per second; each check starts a thread and reads a file."""


class ProgressWatchdog:
    """Waits for a peer, at most `timeout_s` without progress, and reports the wait in the heartbeat."""

    def __init__(self, heartbeat: HeartbeatWriter, peers: Mapping[str, PeerMonitor], timeout_s: float) -> None:
        self._heartbeat, self._peers, self._timeout_s = heartbeat, peers, timeout_s
        self._check: asyncio.Task[None] | None = None
        self._checked_at: dict[str, float] = {}
        self._progress_token: Hashable = None
        self._since = time.monotonic()

    async def _check_peer(self, role: str) -> None:
        """Raise PeerLost if a role is lost, unless it was checked just before.

        A file system that hangs delays the check, but not the deadline.
        """
        if self._check is None:
            now = time.monotonic()
            if now - self._checked_at.get(role, -math.inf) < _MIN_CHECK_INTERVAL_S:
                return
            self._checked_at[role] = now
            self._check = asyncio.create_task(run_in_daemon_thread(self._peers[role].check))
        await asyncio.wait({self._check}, timeout=_CHECK_INTERVAL_S)
        if self._check.done():
            check, self._check = self._check, None
            check.result()

    async def start(self, work: Coroutine[Any, Any, None], role: str) -> None:
        """Run `work`, which waits for the start of `role`; raise PeerLost if `role` is lost meanwhile."""
        self._heartbeat.enter(f"wait for {role}", waiting_for=role)
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_CHECK_INTERVAL_S)
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
        unblock: Callable[[float], bool] = lambda timeout_s: False,
        *,
        step: int | None = None,
        version: int | None = None,
    ) -> None:
        """Wait until `wake` is set; raise RunError without progress for `timeout_s`, PeerLost if `role` is lost.

        Args:
            wake: set by events.
            progress_token: changes whenever progress was made.
            phase: for the heartbeat, such as "wait for version 3".
            role: the peer.
            waiting_for: the event, for the error.
            unblock: called with `timeout_s` at the deadline; the wait continues if it returns True.
            step: of the batch, for the timeline.
            version: that is waited for, for the timeline.
        """
        if progress_token != self._progress_token:
            self._progress_token, self._since = progress_token, time.monotonic()
            self._heartbeat.advance()
        self._heartbeat.enter(phase, self._timeout_s, role, step=step, version=version)
        while not wake.is_set():
            await self._check_peer(role)
            left_s = self._since + self._timeout_s - time.monotonic()
            if left_s <= 0 and unblock(self._timeout_s):
                self._since, left_s = time.monotonic(), self._timeout_s
            elif left_s <= 0:
                raise RunError(
                    f"nothing happened for {self._timeout_s:.0f} s (wait_timeout_seconds); waiting for {waiting_for}; "
                    f"{self._peers[role].describe()}"
                )
            await pause(wake, min(left_s, _CHECK_INTERVAL_S))


async def watch_supervisor(supervisor: PeerMonitor) -> None:
    """Log when the supervisor `rl` stops writing heartbeats; until cancelled."""
    while True:
        await run_in_daemon_thread(supervisor.log_changes)
        await asyncio.sleep(_CHECK_INTERVAL_S)
