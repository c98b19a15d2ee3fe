"""Metrics of a batch (metrics/orchestrator.jsonl)."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prime_rl.core.pass_at_k import REWARD_TOLERANCE, pass_at_k
from prime_rl.core.types import Group, Rollout
from prime_rl.evaluation.eval_statistics import PASS_AT
from prime_rl.rollouts.token_accounting import DiscardedWork
from prime_rl.rollouts.workers.environment_pool import EnvironmentPool
from prime_rl.storage.batch import Batch


@dataclass(slots=True)
class RunCounters:
    """Counters since the start of the run, and timers since the last batch.

    Each token of a finished group is shipped, dropped under a reason, or held (complete, not yet shipped). The rest was
    wasted, which should be 0 (I2); each number is counted independently, so an error shows. Tokens of unfinished groups
    are lost for a reason (`DiscardedWork`):

        tokens/sampled = shipped + dropped + held + wasted + sum of tokens/lost/<reason>
    """

    sampled_tokens: int = 0
    shipped_tokens: int = 0
    dropped_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    rollouts: int = 0
    tokens: int = 0
    rewards: list[NDArray[np.float64]] = field(default_factory=list)
    batch_started: float = field(default_factory=time.monotonic)
    blocked_since: float | None = None
    blocked_s: float = 0.0

    def arrived(self, group: Group) -> None:
        """Count a group that was sampled completely."""
        tokens = int(group.lengths.sum())
        self.sampled_tokens += tokens
        self.tokens += tokens
        self.rollouts += len(group.rollouts)
        self.rewards.append(group.rewards)

    def discarded(self, reason: str, group: Group | None = None) -> None:
        """Count a dropped group; `group` if it was sampled completely."""
        self.dropped[reason] += 1
        if group is not None:
            self.dropped_tokens += int(group.lengths.sum())

    def shipped(self, batch: Batch) -> None:
        """Count the tokens of a batch."""
        self.shipped_tokens += int((batch.versions >= 0).sum())

    def set_blocked(self, blocked: bool) -> None:
        """Start or stop the timer of the time in which no group can run until the next version."""
        now = time.monotonic()
        if blocked and self.blocked_since is None:
            self.blocked_since = now
        elif not blocked and self.blocked_since is not None:
            self.blocked_s += now - self.blocked_since
            self.blocked_since = None

    def next_batch(self, held: Iterable[Group], losses: DiscardedWork, pass_threshold: float) -> dict[str, float]:
        """Return the metrics since the last batch and reset the timers.

        `held` are complete groups not yet shipped; a rollout with a reward of `pass_threshold` solves its example.
        """
        self.set_blocked(False)
        now = time.monotonic()
        elapsed = now - self.batch_started
        held_tokens = sum(int(group.lengths.sum()) for group in held)
        metrics = {
            "time/step": elapsed,
            "time/wait_for_policy": self.blocked_s,
            "perf/rollouts_per_second": self.rollouts / elapsed if elapsed else 0.0,
            "perf/tokens_per_second": self.tokens / elapsed if elapsed else 0.0,
            "reward/sampled/mean": float(np.mean(np.concatenate(self.rewards))) if self.rewards else 0.0,
            **solve_rates(self.rewards, pass_threshold),
            "tokens/wasted": self.sampled_tokens - self.shipped_tokens - self.dropped_tokens - held_tokens,
            "tokens/sampled": self.sampled_tokens + losses.tokens.total(),
            **losses.metrics(),
            "tokens/held": held_tokens,
            "tokens/shipped": self.shipped_tokens,
            "tokens/dropped": self.dropped_tokens,
            "groups/retried": self.retried,
            **{f"dropped/{reason}": count for reason, count in self.dropped.items()},
        }
        self.batch_started, self.blocked_s, self.rollouts, self.tokens, self.rewards = now, 0.0, 0, 0, []
        return metrics


def solve_rates(rewards: Sequence[NDArray[np.float64]], pass_threshold: float) -> dict[str, float]:
    """Return how many groups were solved by all and by none of their rollouts, and pass@k; {} without groups.

    Args:
        rewards: [G] of each group. k are the powers of two up to the smallest G.
        pass_threshold: reward from which a rollout solves its example.
    """
    if not rewards:
        return {}
    counts = [(len(group), int((group >= pass_threshold - REWARD_TOLERANCE).sum())) for group in rewards]
    smallest = min(size for size, _ in counts)
    return {
        "groups/solved_all": float(np.mean([solved == size for size, solved in counts])),
        "groups/solved_none": float(np.mean([solved == 0 for _, solved in counts])),
        **{f"pass@{k}": float(np.mean([pass_at_k(*count, k) for count in counts])) for k in PASS_AT if k <= smallest},
    }


def environment_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics `env/<env>/...` of the groups of a batch."""
    metrics: dict[str, float] = {}
    for env in sorted({group.env for group in groups}):
        own = [group for group in groups if group.env == env]
        rollouts = [rollout for group in own for rollout in group.rollouts]
        rewards = np.array([rollout.reward for rollout in rollouts])
        measured = {
            "batch_share": len(own) / len(groups),
            "reward/std": rewards.std(),
            "reward/min": rewards.min(),
            "reward/max": rewards.max(),
            "completion_len/mean": np.mean([rollout.sampled_tokens for rollout in rollouts]),
            "is_truncated/mean": np.mean([rollout.is_truncated for rollout in rollouts]),
            **_metric_means(rollouts),
        }
        metrics |= {f"env/{env}/{name}": float(value) for name, value in measured.items()}
    return metrics


def rollout_times(pools: Iterable[EnvironmentPool]) -> dict[str, float]:
    """Return the mean seconds of a rollout by activity, over those that finished since the last call."""
    return {
        f"env/{pool.name}/time/{activity}": seconds
        for pool in pools
        for activity, seconds in pool.seconds.take_means().items()
    }


def _metric_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    names = sorted({name for rollout in rollouts for name in rollout.metrics})
    return {
        f"metrics/{name}": float(np.mean([r.metrics[name] for r in rollouts if name in r.metrics])) for name in names
    }


def batch_metrics(
    step: int, groups: Sequence[Group], advantages: Sequence[NDArray[np.float64]], batch: Batch, seq_len: int
) -> dict[str, float]:
    """Return the metrics of batch `step`: rewards, lengths, staleness, packing."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards, per_rollout = np.array([rollout.reward for rollout in rollouts]), np.concatenate(advantages)
    staleness = step - batch.versions[batch.versions >= 0]
    logprobs = batch.logprobs[batch.loss_mask != 0]
    lengths = np.array([rollout.sampled_tokens for rollout in rollouts])
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/min": rewards.min(),
        "reward/max": rewards.max(),
        "advantage/mean": per_rollout.mean(),
        "advantage/std": per_rollout.std(),
        "advantage/min": per_rollout.min(),
        "advantage/max": per_rollout.max(),
        "sampler_logprob/mean": logprobs.mean(dtype=np.float64) if len(logprobs) else math.nan,
        "batch/zero_advantage_groups": np.mean([not values.any() for values in advantages]),
        "batch/rollouts_per_group": len(rollouts) / len(groups),
        "staleness/max": staleness.max(),
        "staleness/mean": staleness.mean(),
        "seq_len/mean": batch.seq_lens.mean(),
        "seq_len/min": batch.seq_lens.min(),
        "seq_len/max": batch.seq_lens.max(),
        "completion_len/mean": batch.loss_mask.sum() / len(rollouts),
        "completion_len/min": lengths.min(),
        "completion_len/max": lengths.max(),
        "is_truncated/mean": np.mean([rollout.is_truncated for rollout in rollouts]),
        "packing/rows": batch.rows,
        "packing/fill": len(batch.tokens) / (batch.rows * seq_len),
    }
    metrics |= _metric_means(rollouts)
    for env in sorted({group.env for group in groups}):
        metrics[f"reward/{env}/mean"] = np.mean([r.reward for g in groups if g.env == env for r in g.rollouts])
    return {name: float(value) for name, value in metrics.items()} | environment_metrics(groups)
