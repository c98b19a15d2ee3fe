"""I7 no hang: whoever waits for another process's work looks meanwhile whether that process still lives.

By hand, each on a node of its own perhaps, nobody else would. Silence, a death or a stop is reported after `silence_s`
and ends the wait after `timeout_s`, in which torchrun, Kubernetes or a person may have started the process again; a
process that is stuck ends it at once. Under `rl` the supervisor alone judges, and this only tells what it saw.
"""

import time
from collections.abc import Callable

from loguru import logger

from prime_rl.errors import RunError
from prime_rl.run.heartbeat import Life, Limits, State, Verdict, Watch
from prime_rl.run.paths import RunPaths

_LOOK_S = 0.5


class PeerLost(RunError):
    """The process whose work was waited for is dead, stopped, stuck, or has ended; the message says since when."""


class Peers:
    """Looks at the processes of one role while this process waits for their work.

    Args:
        paths: of the run.
        role: whose.
        limits: when a process is silent, and when dead.
        judges: whether a wait for a lost process ends; it does not under `rl`, which ends or restarts it itself.
        heard_otherwise: they answer requests, so that silence says nothing, and one of several does for the others: a
            wait ends when each says that it is stuck, or has failed or ended, or is gone or stopped on this node.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        paths: RunPaths,
        role: str,
        limits: Limits,
        judges: bool,
        heard_otherwise: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths, self._role, self._limits, self._judges, self._clock = paths, role, limits, judges, clock
        self._heard_otherwise = heard_otherwise
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
        self.look()
        if not self._judges:
            return
        seen = [verdict for verdict in self._verdicts if verdict.seen]
        for verdict in seen:
            self._report(verdict)
        lost = [verdict for verdict in seen if self._is_lost(verdict)]
        if lost and (len(lost) == len(seen) or not self._heard_otherwise):
            raise PeerLost(f"{lost[0]}; it is what this process waits for")

    def look(self) -> None:
        """See who lives, and end nothing: who was never seen alive is later taken for one of an earlier run."""
        self._verdicts, self._looked = self._watch.look(), self._clock()

    def report(self) -> None:
        """Look, and tell in the log who is silent, stopped or dead, and who goes on. Nobody waits for them."""
        self.look()
        for verdict in self._verdicts:
            if verdict.seen:
                self._report(verdict)

    def told(self) -> str:
        """What is known of the role, for the error of a wait: who, since when, phase, log."""
        self._verdicts = self._verdicts or self._watch.look()
        if not self._verdicts:
            return f"{self._paths.heartbeats_dir} has no heartbeat of {self._role}"
        worst = [verdict for verdict in self._verdicts if verdict.state is not State.ALIVE] or self._verdicts
        return "; ".join(map(str, worst[:2]))

    def _is_lost(self, verdict: Verdict) -> bool:
        if verdict.state is State.STUCK:
            return True
        if self._heard_otherwise and verdict.life in (Life.RUNNING, Life.UNKNOWN) and not verdict.is_over:
            return False
        return verdict.state is not State.ALIVE and verdict.for_s > self._limits.timeout_s

    def _report(self, verdict: Verdict) -> None:
        before = self._reported.get(verdict.name, State.ALIVE)
        if verdict.state is before:
            return
        self._reported[verdict.name] = verdict.state
        if verdict.state is State.ALIVE:
            logger.info("{} goes on", verdict.beat)
        else:
            ends = self._judges and not self._heard_otherwise
            until = f"; waiting for it up to {self._limits.timeout_s:g} s" if ends else ""
            logger.warning("{}{}", verdict, until)
