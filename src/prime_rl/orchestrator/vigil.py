"""I7 no hang: the orchestrator's wait ends when something happens, at its deadline, or when the other is lost.

The loop is woken for many reasons, each second by a look at the servers' load alone. So the deadline counts from the
last time that something came of it: a group ended, a batch was shipped, a version was switched to.
"""

import asyncio
import time
from collections.abc import Coroutine, Hashable, Mapping
from contextlib import suppress
from typing import Any

from prime_rl.errors import RunError
from prime_rl.orchestrator.tasks import end_tasks
from prime_rl.run.heart import Heartbeat
from prime_rl.run.peers import Peers

TRAINER, INFERENCE, SUPERVISOR = "trainer", "inference", "rl"
_LOOK_S = 1.0


class Vigil:
    """Waits, and says for whom.

    Args:
        heart: of this process.
        peers: by role; looked after while they are waited for.
        timeout_s: longest time without progress.
    """

    def __init__(self, heart: Heartbeat, peers: Mapping[str, Peers], timeout_s: float) -> None:
        self._heart, self._peers, self._timeout_s = heart, peers, timeout_s
        self._mark: Hashable = None
        self._since = time.monotonic()

    async def start(self, work: Coroutine[Any, Any, None], role: str) -> None:
        """Do `work`, which waits for the start of `role`.

        Raises:
            PeerLost: it has failed meanwhile, or is gone.
        """
        self._heart.enter(f"wait for {role}", waiting_for=role)
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_LOOK_S)
                await asyncio.to_thread(self._peers[role].check)
        finally:
            await end_tasks(task)
        await task

    async def wait(self, wake: asyncio.Event, mark: Hashable, phase: str, role: str, who: str) -> None:
        """Wait until `wake` is set.

        Args:
            wake: set by whatever may have changed something.
            mark: what would be another if something had happened since the last call.
            phase: for people, such as "wait for version 3".
            role: that is waited for.
            who: for whom, for the error.

        Raises:
            RunError: `mark` has been the same for `timeout_s` seconds.
            PeerLost: who is waited for is lost.
        """
        if mark != self._mark:
            self._mark, self._since = mark, time.monotonic()
            self._heart.advance()
        self._heart.enter(phase, self._timeout_s, role)
        while not wake.is_set():
            await asyncio.to_thread(self._peers[role].check)
            left_s = self._since + self._timeout_s - time.monotonic()
            if left_s <= 0:
                raise RunError(
                    f"nothing happened for {self._timeout_s:.0f} s (wait_timeout_seconds); waiting for {who}; "
                    f"{self._peers[role].told()}"
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, _LOOK_S)):  # not wait_for: it may swallow a cancellation (3.11)
                    await wake.wait()


async def watch_supervisor(supervisor: Peers) -> None:
    """Tell in the log when `rl`, which looks after everybody else, is silent or stopped itself; until cancelled."""
    while True:
        await asyncio.to_thread(supervisor.report)
        await asyncio.sleep(_LOOK_S)
