"""Which groups an environment may start, which finished ones are trained on, and what too many drops in a row do."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_rl.configs.buffer import BufferConfig, OnlineDifficultyBufferConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.pass_at_k import REWARD_TOLERANCE
from prime_rl.core.types import Group, Rollout
from prime_rl.orchestrator.algorithms.advantages import has_only_zero_advantages

OVERLONG = "overlong"
_LIMIT_BATCHES = 10
"""An environment is exhausted after this many batches' worth of consecutive drops."""
_SHORTEST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class DropReason:
    """Why a group is not trained on: the name under which it is counted, and an explanation for the log.

    With `zero_advantage`, the group is complete and could fill a batch, but all its advantages are zero.
    """

    name: str
    explanation: str
    zero_advantage: bool = False


class GroupFilter:
    """Decides which finished groups are trained on."""

    def __init__(self, config: OrchestratorConfig) -> None:
        self._config = config
        self._warned = set[str]()

    def reason_to_drop(self, group: Group) -> DropReason | None:
        """Return why a finished group is not trained on; None if it is kept."""
        config = self._config
        if is_overlong(group.rollouts, config.seq_len):
            return DropReason(OVERLONG, "a sample does not fit into seq_len")
        if is_off_difficulty(group, config.buffer):
            return DropReason("filter/difficulty", f"its mean reward is {group.rewards.mean():.3g}")
        self._warn_of_unfiltered(group.env, group.rewards)
        if config.filter_zero_advantage and has_only_zero_advantages(group, config):
            return DropReason("zero_advantage", "all its advantages are 0", zero_advantage=True)
        return None

    def _warn_of_unfiltered(self, env: str, rewards: NDArray[np.float64]) -> None:
        """Warn once per environment if all rewards of a group are equal, but neither 0 nor 1.

        If the best reward of an environment is 1.1, the mean of a solved group is 1.1, and
        `online_difficulty_filtering` keeps it.
        """
        buffer = self._config.buffer
        if isinstance(buffer, OnlineDifficultyBufferConfig) or not buffer.online_difficulty_filtering:
            return
        if len(rewards) > 1 and np.ptp(rewards) == 0 and env not in self._warned:
            self._warned.add(env)
            logger.warning(
                "environment {} gave all rollouts of a group the reward {:g}: online_difficulty_filtering keeps such a "
                "group, since it drops only rewards of exactly 0 and 1; set buffer.type = online-difficulty with "
                "min_reward and max_reward, or filter_zero_advantage",
                env, float(rewards[0]),
            )  # fmt: skip


def is_overlong(rollouts: Sequence[Rollout], seq_len: int) -> bool:
    """Return whether a sample of the group is longer than `seq_len` tokens."""
    return any(len(sample) > seq_len for rollout in rollouts for sample in rollout.samples)


def is_off_difficulty(group: Group, buffer: BufferConfig) -> bool:
    """Return whether a group is too easy or too hard, by its rewards.

    `online-difficulty` keeps min_reward <= mean <= max_reward. The other buffers, with `online_difficulty_filtering`,
    drop a group if all rewards are 0, or all are 1, including those of its parts: in a zero-sum game all episodes have
    the same reward, but their agents do not.
    """
    if isinstance(buffer, OnlineDifficultyBufferConfig):
        return not buffer.min_reward <= float(group.rewards.mean()) <= buffer.max_reward
    credits = [credit for rollout in group.rollouts for credit in rollout.credits]
    rewards = {*group.rewards.tolist(), *(credit.reward for credit in credits)}
    has_given = any(credit.advantage for credit in credits)
    are_equal = any(all(abs(reward - value) <= REWARD_TOLERANCE for reward in rewards) for value in (0, 1))
    return buffer.online_difficulty_filtering and are_equal and not has_given


class EnvironmentHealth:
    """Pauses an environment that fails, so that an outage costs seconds and a few groups instead of the run.

    After an error no group starts for a pause. Then a trial starts a few groups: B / 2 after the first pause, half as
    many after each further one, at least one. If one fails, the next pause is twice as long, up to
    `longest_pause_seconds`. Errors of groups that started before the pause are only counted. The first group that ends
    without an error makes the environment healthy again.
    """

    def __init__(self, batch_groups: int, longest_pause_seconds: float = LONGEST_PAUSE_SECONDS) -> None:
        self.errors = 0
        """Consecutive groups that failed."""
        self.has_succeeded = False
        """Whether a group has ever ended without an error."""
        self._batch_groups = batch_groups
        self._longest_pause_seconds = longest_pause_seconds
        self._pauses = 0
        self.paused_until = 0.0
        """End of the last pause, by `time.monotonic`."""
        self._failing_since: float | None = None
        self._trial = set[int]()

    @property
    def failing_seconds(self) -> float:
        """Seconds since the first of the consecutive errors; 0 while it is healthy."""
        return 0.0 if self._failing_since is None else time.monotonic() - self._failing_since

    @property
    def pause_seconds(self) -> float:
        """Seconds until the next group may start."""
        return max(0.0, self.paused_until - time.monotonic()) if self._pauses else 0.0

    @property
    def may_start(self) -> bool:
        """Whether a group may start now."""
        if not self._pauses:
            return True
        return not self.pause_seconds and len(self._trial) < max(1, self._batch_groups >> self._pauses)

    def started(self, group_id: int) -> None:
        """Record that a group starts; after a pause it belongs to the trial."""
        if self._pauses:
            self._trial.add(group_id)

    def failed(self, group_id: int) -> None:
        """Count a group that ended with an error, and pause unless it started before the last pause."""
        self.errors += 1
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        if not self._pauses or group_id in self._trial:
            pause_seconds = min(_SHORTEST_PAUSE_SECONDS * 2.0 ** min(self._pauses, 16), self._longest_pause_seconds)
            self._pauses += 1
            self.paused_until = time.monotonic() + pause_seconds
            self._trial.clear()

    def succeeded(self) -> None:
        """Record a group that ended without an error, and reset the errors."""
        self.has_succeeded = True
        self.errors = self._pauses = 0
        self.paused_until = 0.0
        self._failing_since = None
        self._trial.clear()


class StartLimits:
    """Limits of each environment for its own rollouts: group size, rollouts in flight, and starts per minute.

    A rate limit spaces the groups evenly: after a group of n rollouts the next may start n / rate minutes later. So no
    burst reaches the service that the limit protects.

    Attributes:
        counts: rollouts of a group, by the index of the environment.
        in_flight: rollouts in flight, by the index of the environment.
        next_start: when the rate allows the next group, by `time.monotonic`, by the index of the environment.
    """

    def __init__(self, config: OrchestratorConfig) -> None:
        """Start without rollouts."""
        self.counts: Sequence[int] = [config.group_size(env) for env in config.env]
        self.in_flight = [0] * len(config.env)
        self._limits = [env.max_concurrent for env in config.env]
        self._seconds = [
            60 * count / env.max_rollouts_per_minute if env.max_rollouts_per_minute else 0.0
            for env, count in zip(config.env, self.counts, strict=True)
        ]
        self.next_start = [0.0] * len(config.env)

    def may_start(self, env: int) -> bool:
        """Return whether a group of environment `env` may start now; one group may always be in flight."""
        limit = self._limits[env]
        if limit is not None and self.in_flight[env] + self.counts[env] > max(limit, self.counts[env]):
            return False
        return time.monotonic() >= self.next_start[env]

    def started(self, env: int) -> None:
        """Count a group that starts."""
        self.in_flight[env] += self.counts[env]
        if self._seconds[env]:
            self.next_start[env] = time.monotonic() + self._seconds[env]

    def ended(self, env: int) -> None:
        """Count a group that is not in flight any more."""
        self.in_flight[env] -= self.counts[env]


class DropAction(Enum):
    """What the dispatcher does with a group that was filtered out or failed.

    DROP admits another group in its place. FILL keeps it although its advantages are zero: the batch is filled with
    such groups. FAIL ends the run: no environment produces groups to train on.
    """

    DROP = "drop"
    FILL = "fill"
    FAIL = "fail"


class DropPolicy:
    """Counts consecutive drops per environment and decides when to fill the batch or end the run. No I/O.

    B is the number of groups in a batch. An environment is exhausted in one of two ways:

        filtered   10 * B groups in a row were filtered out since the last ship, and none was kept
        failing    at least B groups in a row ended with an error, for `failing_seconds` seconds or longer
                   (`failing_at_start_seconds` until the first group succeeds)

    A filtered environment gets no positions until the next ship; a failing one is retried after pauses
    (`EnvironmentHealth`). The other environments take their turns. When all environments are exhausted:

        no dropped group had only zero advantages   -> FAIL
        some had                                    -> FILL from the next such group until the ship

    Groups that fill a batch count as kept, so each group of a batch costs less than 20 * B drops per environment.

    Example, B = 2, one environment: twenty groups in a row are dropped, one of them for zero advantage. The next two
    groups with zero advantages are kept, as is any other that completes. The batch ships, and the counts restart.
    """

    def __init__(
        self,
        batch_groups: int,
        oversampling: float = 1.0,
        environments: int = 1,
        failing_seconds: float = 0.0,
        longest_pause_seconds: float = LONGEST_PAUSE_SECONDS,
        failing_at_start_seconds: float = math.inf,
    ) -> None:
        """Start with all environments healthy; `oversampling` is (B + largest credit) / B, >= 1."""
        self.health = [EnvironmentHealth(batch_groups, longest_pause_seconds) for _ in range(environments)]
        """By the index of the environment."""
        self._batch_groups = batch_groups
        self._failing_seconds = failing_seconds
        self._failing_at_start_seconds = failing_at_start_seconds
        self._limit = _LIMIT_BATCHES * batch_groups
        self._max_credit = int((oversampling - 1) * batch_groups)
        self._num_filtered = [0] * environments
        self._has_zero_advantage = [False] * environments
        self._filling = False
        self._drop_rate = 0.0

    @property
    def num_consecutive_drops(self) -> int:
        """Consecutive drops, summed over the environments."""
        return sum(self._num_filtered) + sum(health.errors for health in self.health)

    def may_start(self, env: int) -> bool:
        """Return whether a group of environment `env` may start now."""
        return self.health[env].may_start and (self._filling or self._num_filtered[env] < self._limit)

    def failure_timeout(self, env: int) -> tuple[float, str]:
        """Return after how many seconds of errors environment `env` is exhausted, and the configuration key."""
        if self.health[env].has_succeeded or self._failing_seconds <= self._failing_at_start_seconds:
            return self._failing_seconds, "orchestrator.failing_env_seconds"
        return self._failing_at_start_seconds, "orchestrator.failing_at_start_seconds"

    def record_filtered(self, zero_advantage: bool = False, env: int = 0) -> DropAction:
        """Count a finished group that the filter drops. With FILL it counts as kept."""
        if self._filling and zero_advantage:
            self.record_kept(env)
            return DropAction.FILL
        self.health[env].succeeded()
        self._num_filtered[env] += 1
        self._has_zero_advantage[env] |= zero_advantage
        return self._drop()

    def record_error(self, group_id: int, env: int = 0) -> DropAction:
        """Count a group of environment `env` that ended with an error."""
        self.health[env].failed(group_id)
        return self._drop()

    def record_kept(self, env: int = 0) -> None:
        """Count a group of environment `env` that will be trained on."""
        self.health[env].succeeded()
        self._num_filtered[env], self._has_zero_advantage[env] = 0, False
        self._update_drop_rate(0.0)

    def start_batch(self) -> None:
        """Restart the counts after a ship."""
        self._reset()
        self._filling = False

    def credit(self, in_flight: int) -> int:
        """Return how many of the groups in flight are expected to be dropped: the scheduler's admission credit."""
        return min(self._max_credit, int(self._drop_rate * in_flight))

    def _drop(self) -> DropAction:
        self._update_drop_rate(1.0)
        for env, health in enumerate(self.health):
            is_failing = health.errors >= self._batch_groups and health.failing_seconds >= self.failure_timeout(env)[0]
            if not is_failing and self._num_filtered[env] < self._limit:
                return DropAction.DROP
        if not any(self._has_zero_advantage):
            return DropAction.FAIL
        self._filling = True
        self._reset()
        return DropAction.DROP

    def _reset(self) -> None:
        self._num_filtered = [0] * len(self.health)
        self._has_zero_advantage = [False] * len(self.health)

    def _update_drop_rate(self, dropped: float) -> None:
        """Update the running mean over about the last 10 * B groups."""
        self._drop_rate += (dropped - self._drop_rate) / self._limit
