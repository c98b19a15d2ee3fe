"""Whether a group may start in an environment, and for how long the environment has been failing."""

import time
from collections.abc import Callable

_SHORTEST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 30.0


class EnvironmentHealth:
    """Pauses an environment that fails, so that an outage costs seconds and a few groups instead of the run.

    After an error no group starts for a pause. Then a trial starts a few groups: B / 2 after the first pause, half as
    many after each further one, at least one. If one fails, the next pause is twice as long, up to `longest_pause_s`.
    Errors of groups that started before the pause are only counted. The first group that ends without an error makes
    the environment healthy again.
    """

    def __init__(
        self,
        batch_groups: int,
        longest_pause_s: float = LONGEST_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.errors = 0
        """Consecutive groups that failed."""
        self.has_succeeded = False
        """Whether a group has ever ended without an error."""
        self._batch_groups = batch_groups
        self._longest_pause_s = longest_pause_s
        self._clock = clock
        self._pauses = 0
        self._paused_until = 0.0
        self._failing_since: float | None = None
        self._trial = set[int]()

    @property
    def failing_s(self) -> float:
        """Seconds since the first of the consecutive errors; 0 while it is healthy."""
        return 0.0 if self._failing_since is None else self._clock() - self._failing_since

    @property
    def pause_s(self) -> float:
        """Seconds until the next group may start."""
        return max(0.0, self._paused_until - self._clock()) if self._pauses else 0.0

    @property
    def may_start(self) -> bool:
        """Whether a group may start now."""
        if not self._pauses:
            return True
        return not self.pause_s and len(self._trial) < max(1, self._batch_groups >> self._pauses)

    def started(self, group_id: int) -> None:
        """Record that a group starts; after a pause it belongs to the trial."""
        if self._pauses:
            self._trial.add(group_id)

    def failed(self, group_id: int) -> None:
        """Count a group that ended with an error, and pause unless it started before the last pause."""
        self.errors += 1
        if self._failing_since is None:
            self._failing_since = self._clock()
        if not self._pauses or group_id in self._trial:
            pause_s = min(_SHORTEST_PAUSE_S * 2.0 ** min(self._pauses, 16), self._longest_pause_s)
            self._pauses += 1
            self._paused_until = self._clock() + pause_s
            self._trial.clear()

    def succeeded(self) -> None:
        """Record a group that ended without an error, and reset the errors."""
        self.has_succeeded = True
        self.errors = self._pauses = 0
        self._failing_since = None
        self._trial.clear()
