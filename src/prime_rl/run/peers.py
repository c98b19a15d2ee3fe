"""I7 no hang: whoever waits for another process's work looks meanwhile whether that process still lives.

By hand, each on a node of its own perhaps, nobody else would. Silence, a death or a stop is reported after `silence_s`
and ends the wait after `timeout_s`, in which torchrun, Kubernetes or a person may have started the process again; a
process that is stuck ends it at once. Under `rl` the supervisor alone judges, and this only tells what it saw.
"""

import time
from collections.abc import Callable

from loguru import logger

from prime_rl.errors import RunError
from prime_rl.run.heartbeat import Limits, State, Verdict, Watch
from prime_rl.run.paths import RunPaths

_LOOK_S = 0.5


class PeerLost(RunError):
    """The process whose work was waited for is dead, stopped, stuck, or has ended; the message says since when."""


class Peers:
    """Looks at the processes of one role while this process waits for their work.

    Args:
        paths: of the run.
        role: `trainer` or `orchestrator`.
        limits: when a process is silent, and when dead.
        judges: whether a wait for a lost process ends; it does not under `rl`, which ends or restarts it itself.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        paths: RunPaths,
        role: str,
        limits: Limits,
        judges: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths, self._role, self._limits, self._judges, self._clock = paths, role, limits, judges, clock
        self._watch = Watch(paths, limits, (role,), clock)
        self._looked = float("-inf")
        self._verdicts: list[Verdict] = []
        self._reported: dict[str, State] = {}

    def check(self) -> None:
        """Look, at most twice a second; to be called again and again during a wait.

        Raises:
            PeerLost: a process of the role is lost. One whose file is older than this process, and has not changed
                since, is taken for one of an earlier run.
        """
        if self._clock() - self._looked < _LOOK_S:
            return
        self._verdicts, self._looked = self._watch.look(), self._clock()
        if not self._judges:
            return
        for verdict in self._verdicts:
            self._report(verdict)
            if verdict.seen and self._is_lost(verdict):
                raise PeerLost(f"{verdict}; it is what this process waits for")

    def told(self) -> str:
        """What is known of the role, for the error of a wait: who, since when, phase, log."""
        if not self._verdicts:
            return f"nothing is known of the {self._role}: {self._paths.heartbeats_dir} has no heartbeat of it"
        worst = [verdict for verdict in self._verdicts if verdict.state is not State.ALIVE] or self._verdicts
        return "; ".join(map(str, worst[:2]))

    def _is_lost(self, verdict: Verdict) -> bool:
        if verdict.state is State.STUCK:
            return True
        return verdict.state is not State.ALIVE and verdict.for_s > self._limits.timeout_s

    def _report(self, verdict: Verdict) -> None:
        before = self._reported.get(verdict.name, State.ALIVE)
        if not verdict.seen or verdict.state is before:
            return
        self._reported[verdict.name] = verdict.state
        if verdict.state is State.ALIVE:
            logger.info("{} goes on", verdict.beat)
        else:
            logger.warning("{}; waiting for it up to {:g} s", verdict, self._limits.timeout_s)
