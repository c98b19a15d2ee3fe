"""What a batch and the time around it look like in numbers: metrics/orchestrator.jsonl and samples/step_n.jsonl."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_rl.run.batch import Batch
from prime_rl.run.surroundings import told
from prime_rl.types import Group


@dataclass(slots=True)
class Tally:
    """Counts since the start of the run, and clocks since the last batch.

    Every sampled token that arrives is then shipped, dropped under a reason, or held (complete, not yet shipped). What
    is in none of them was wasted (I2): each number is counted where it happens, so that one that is lost shows.
    """

    sampled_tokens: int = 0
    shipped_tokens: int = 0
    dropped_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    rollouts: int = 0
    tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    batch_started: float = field(default_factory=time.monotonic)
    blocked_since: float | None = None
    blocked_s: float = 0.0

    def arrived(self, group: Group) -> None:
        """Count a group that was played to its end."""
        tokens = int(group.lengths.sum())
        self.sampled_tokens += tokens
        self.tokens += tokens
        self.rollouts += len(group.rollouts)
        self.rewards += [rollout.reward for rollout in group.rollouts]

    def discarded(self, reason: str, group: Group | None = None) -> None:
        """Count a group that is dropped; `group` where it was sampled to its end."""
        self.dropped[reason] += 1
        if group is not None:
            self.dropped_tokens += int(group.lengths.sum())

    def shipped(self, batch: Batch) -> None:
        """Count the tokens of a batch."""
        self.shipped_tokens += int((batch.versions >= 0).sum())

    def wait_for_policy(self, blocked: bool) -> None:
        """Start or stop the clock of the time in which nothing runs because the next version is not there yet."""
        now = time.monotonic()
        if blocked and self.blocked_since is None:
            self.blocked_since = now
        elif not blocked and self.blocked_since is not None:
            self.blocked_s += now - self.blocked_since
            self.blocked_since = None

    def next_batch(self, held: Iterable[Group]) -> dict[str, float]:
        """Describe the time since the last batch and the account of tokens; start the clocks anew.

        Args:
            held: the groups that are complete and not shipped.
        """
        self.wait_for_policy(False)
        now = time.monotonic()
        elapsed = now - self.batch_started
        held_tokens = sum(int(group.lengths.sum()) for group in held)
        metrics = {
            "time/step": elapsed,
            "time/wait_for_policy": self.blocked_s,
            "perf/rollouts_per_second": self.rollouts / elapsed if elapsed else 0.0,
            "perf/tokens_per_second": self.tokens / elapsed if elapsed else 0.0,
            "reward/sampled/mean": float(np.mean(self.rewards)) if self.rewards else 0.0,
            "tokens/wasted": self.sampled_tokens - self.shipped_tokens - self.dropped_tokens - held_tokens,
            "tokens/sampled": self.sampled_tokens,
            "tokens/shipped": self.shipped_tokens,
            "tokens/dropped": self.dropped_tokens,
            "groups/retried": self.retried,
            **{_metric(reason): count for reason, count in self.dropped.items()},
        }
        self.batch_started, self.blocked_s, self.rollouts, self.tokens, self.rewards = now, 0.0, 0, 0, []
        return metrics


def _metric(reason: str) -> str:
    """Name the count of drops under `reason`."""
    return reason if reason.startswith("error/") else f"dropped/{reason}"


def batch_metrics(
    step: int, groups: Sequence[Group], advantages: Sequence[NDArray[np.float64]], batch: Batch, seq_len: int
) -> dict[str, float]:
    """Describe batch `step`: rewards, lengths, staleness (versions between the sampler's and v_step), packing."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.array([rollout.reward for rollout in rollouts])
    staleness = step - batch.versions[batch.versions >= 0]
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "advantage/std": np.concatenate(advantages).std(),
        "batch/zero_advantage_groups": np.mean([not values.any() for values in advantages]),
        "staleness/max": staleness.max(),
        "staleness/mean": staleness.mean(),
        "seq_len/mean": batch.seq_lens.mean(),
        "seq_len/max": batch.seq_lens.max(),
        "completion_len/mean": batch.loss_mask.sum() / len(rollouts),
        "is_truncated/mean": np.mean([rollout.is_truncated for rollout in rollouts]),
        "packing/rows": batch.rows,
        "packing/fill": len(batch.tokens) / (batch.rows * seq_len),
    }
    for name in sorted({name for rollout in rollouts for name in rollout.metrics}):
        metrics[f"metrics/{name}"] = np.mean([r.metrics[name] for r in rollouts if name in r.metrics])
    for env in sorted({group.env for group in groups}):
        metrics[f"reward/{env}/mean"] = np.mean([r.reward for g in groups if g.env == env for r in g.rollouts])
    return {name: float(value) for name, value in metrics.items()}


def sample_rows(groups: Sequence[Group], advantages: Sequence[NDArray[np.float64]]) -> list[dict[str, Any]]:
    """Return one JSON-able row per rollout. The text is model output: untrusted, to be escaped where it is shown."""
    return [
        {
            "group_id": group.group_id,
            "rollout": index,
            "env": group.env,
            "reward": rollout.reward,
            "advantage": float(values[index]),
            "metrics": rollout.metrics,
            "is_truncated": rollout.is_truncated,
            "min_version": min(int(s.versions[s.versions >= 0].min()) for s in rollout.samples),
            "max_version": max(int(s.versions.max()) for s in rollout.samples),
            "messages": [{"role": role, "content": content} for role, content in rollout.text],
        }
        for group, values in zip(groups, advantages, strict=True)
        for index, rollout in enumerate(group.rollouts)
    ]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write `rows` as JSON lines.

    Raises:
        SurroundingsError: the disk is full ...
    """
    with told("write the samples of a batch", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
