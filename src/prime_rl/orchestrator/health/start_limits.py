"""Limits that an environment sets for its own rollouts: group size, rollouts in flight, and starts per minute."""

import time
from collections.abc import Callable, Sequence

from prime_rl.configs.orchestrator import OrchestratorConfig


class StartLimits:
    """Counts the rollouts in flight and decides when an environment may start another group.

    A rate limit spaces the groups evenly: after a group of n rollouts the next may start n / rate minutes later. So no
    burst reaches the service that the limit protects.

    Attributes:
        counts: rollouts of a group, by the index of the environment.
        in_flight: rollouts in flight, by the index of the environment.
    """

    def __init__(self, config: OrchestratorConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without rollouts."""
        self.counts: Sequence[int] = [config.group_size(env) for env in config.env]
        self.in_flight = [0] * len(config.env)
        self._limits = [env.max_concurrent for env in config.env]
        self._seconds = [
            60 * count / env.max_rollouts_per_minute if env.max_rollouts_per_minute else 0.0
            for env, count in zip(config.env, self.counts, strict=True)
        ]
        self._next_start = [0.0] * len(config.env)
        self._clock = clock

    def may_start(self, env: int) -> bool:
        """Return whether a group of environment `env` may start now; one group may always be in flight."""
        limit = self._limits[env]
        if limit is not None and self.in_flight[env] + self.counts[env] > max(limit, self.counts[env]):
            return False
        return self._clock() >= self._next_start[env]

    def started(self, env: int) -> float:
        """Count a group that starts; return the seconds until the next may start, by the rate alone."""
        self.in_flight[env] += self.counts[env]
        if not self._seconds[env]:
            return 0.0
        self._next_start[env] = self._clock() + self._seconds[env]
        return self._seconds[env]

    def ended(self, env: int) -> None:
        """Count a group that is not in flight any more."""
        self.in_flight[env] -= self.counts[env]
