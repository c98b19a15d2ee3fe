"""What a run reports: metrics (metrics/orchestrator.jsonl), rollouts as text (samples/step_n.jsonl), and warnings."""

import asyncio
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_rl.core.os_errors import wrap_os_errors
from prime_rl.core.pass_at_k import REWARD_TOLERANCE, pass_at_k
from prime_rl.core.types import Group, Rollout
from prime_rl.evaluation.eval_report import PASS_AT
from prime_rl.rollouts.workers.environment_pool import EnvironmentPool
from prime_rl.rollouts.workers.protocol import DiscardedWork
from prime_rl.storage.batch import SHOWN_FILE, Batch
from prime_rl.storage.paths import RunPaths


@dataclass(slots=True)
class RunCounters:
    """Counters since the start of the run, and timers since the last batch.

    Each token of a finished group is shipped, dropped under a reason, or held (complete, not yet shipped). The rest is
    unaccounted for, which should be 0 (I2); each number is counted independently, so an error shows. Tokens of
    unfinished groups are lost for a reason (`DiscardedWork`):

        tokens/sampled = shipped + dropped + held + unaccounted + sum of tokens/lost/<reason>
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
    waiting: tuple[str, float] | None = None
    waited_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def restored(self, group: Group) -> None:
        """Count a group that an earlier process sampled completely, and not as one since the last batch."""
        self.sampled_tokens += int(group.lengths.sum())

    def arrived(self, group: Group) -> None:
        """Count a group that was sampled completely."""
        self.restored(group)
        self.tokens += int(group.lengths.sum())
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

    def wait_for(self, what: Literal["policy", "pause"] | None) -> None:
        """Start the timer of the time in which no group runs until the next version or a pause ends; None stops it."""
        now = time.monotonic()
        if self.waiting is not None:
            self.waited_seconds[self.waiting[0]] += now - self.waiting[1]
        self.waiting = what and (what, now)

    def next_batch(self, held: Iterable[Group], losses: DiscardedWork, pass_threshold: float) -> dict[str, float]:
        """Return the metrics since the last batch and reset the timers.

        `held` are complete groups not yet shipped; a rollout with a reward of `pass_threshold` solves its example.
        """
        self.wait_for(None)
        now = time.monotonic()
        elapsed = now - self.batch_started
        held_tokens = sum(int(group.lengths.sum()) for group in held)
        metrics = {
            "time/step": elapsed,
            "time/wait_for_policy": self.waited_seconds["policy"],
            "time/wait_for_pause": self.waited_seconds["pause"],
            "perf/rollouts_per_second": self.rollouts / elapsed if elapsed else 0.0,
            "perf/tokens_per_second": self.tokens / elapsed if elapsed else 0.0,
            "reward/sampled/mean": float(np.mean(np.concatenate(self.rewards))) if self.rewards else math.nan,
            **solve_rates(self.rewards, pass_threshold),
            "tokens/unaccounted": self.sampled_tokens - self.shipped_tokens - self.dropped_tokens - held_tokens,
            "tokens/sampled": self.sampled_tokens + losses.tokens.total(),
            **losses.metrics(),
            "tokens/held": held_tokens,
            "tokens/shipped": self.shipped_tokens,
            "tokens/dropped": self.dropped_tokens,
            "groups/retried": self.retried,
            **{f"dropped/{reason}": count for reason, count in self.dropped.items()},
        }
        self.waited_seconds.clear()
        self.batch_started, self.rollouts, self.tokens, self.rewards = now, 0, 0, []
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


def group_sources(groups: Sequence[Group]) -> dict[str, list[int]]:
    """Return the group_ids by `env/<env>` and by `server/<host:port>`, each if the groups have several of the kind."""
    servers = [urlsplit(group.server).netloc.rpartition("@")[2] for group in groups]  # without a password
    kinds = {"env": [group.env for group in groups], "server": servers}
    return {
        f"{kind}/{name}": [group.group_id for group, own in zip(groups, names, strict=True) if own == name]
        for kind, names in kinds.items()
        if len(set(names)) > 1
        for name in sorted({*names} - {""})
    }


def environment_metrics(groups: Sequence[Group], advantages: Sequence[NDArray[np.float64]]) -> dict[str, float]:
    """Return the metrics `env/<env>/...` and `reward/<env>/mean` of the groups of a batch."""
    metrics: dict[str, float] = {}
    for env in sorted({group.env for group in groups}):
        own = [group for group in groups if group.env == env]
        has_zero = [not values.any() for group, values in zip(groups, advantages, strict=True) if group.env == env]
        rollouts = [rollout for group in own for rollout in group.rollouts]
        rewards = np.array([rollout.reward for rollout in rollouts])
        measured = {
            "batch_share": len(own) / len(groups),
            "groups": len(own),
            "zero_advantage_groups": np.mean(has_zero),
            "reward/std": rewards.std(),
            "reward/min": rewards.min(),
            "reward/max": rewards.max(),
            "completion_len/mean": np.mean([rollout.sampled_tokens for rollout in rollouts]),
            "is_truncated/mean": np.mean([rollout.is_truncated for rollout in rollouts]),
            **_metric_means(rollouts),
        }
        metrics |= {f"env/{env}/{name}": float(value) for name, value in measured.items()}
        metrics[f"reward/{env}/mean"] = float(rewards.mean())
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
        "completion_len/mean": lengths.mean(),
        "completion_len/min": lengths.min(),
        "completion_len/max": lengths.max(),
        "is_truncated/mean": np.mean([rollout.is_truncated for rollout in rollouts]),
        "packing/rows": batch.rows,
        "packing/fill": len(batch.tokens) / (batch.rows * seq_len),
    }
    metrics |= sample_metrics(rollouts) | _metric_means(rollouts)
    return {name: float(value) for name, value in metrics.items()} | environment_metrics(groups, advantages)


def sample_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return how many samples the rollouts have, and `Rollout.sample_counts`."""
    counts, branches = Counter[str](), 0
    for rollout in rollouts:
        counts.update(rollout.sample_counts)
        forks = sum(count for name, count in rollout.sample_counts.items() if name.startswith("false_forks/"))
        branches += max(1, len(rollout.samples) - forks) if rollout.samples else 0
    samples = sum(len(rollout.samples) for rollout in rollouts)
    return {
        "samples/per_rollout": samples / len(rollouts),
        "samples/per_branch": samples / branches if branches else math.nan,
        **{f"samples/{name}": count for name, count in counts.items()},
    }


class SampleFiles:
    """Writes `samples/step_n.jsonl`, one row per rollout, for people and the page.

    Args:
        paths: of the run.
        num_rollouts: rollouts per batch at most, in complete groups, at least one group; None keeps all.
        num_files: number of newest files to keep; None keeps all.
        interval: also keep the files of the steps that it divides; None keeps no others.
        identities: of the environments, by name.
    """

    def __init__(
        self,
        paths: RunPaths,
        num_rollouts: int | None = None,
        num_files: int | None = None,
        interval: int | None = None,
        identities: Mapping[str, str | None] = MappingProxyType({}),
    ) -> None:
        self._identities = identities
        self._paths, self._num_rollouts, self._num_files, self._interval = paths, num_rollouts, num_files, interval
        self._oldest = 0

    def write(
        self, step: int, groups: Sequence[Group], advantages: Sequence[NDArray[np.float64]]
    ) -> list[dict[str, Any]]:
        """Write a part of batch `step`, delete old files, and return the rows. Blocks. Raises SystemResourceError.

        The text of a row is untrusted model output: escape it before showing it.
        """
        path, sizes, chosen = self._paths.samples(step), [len(g.rollouts) for g in groups], list(range(len(groups)))
        if self._num_rollouts is not None and self._num_rollouts < sum(sizes):  # groups at equal distances in the batch
            count = max(1, self._num_rollouts // max(sizes))
            chosen = [index * len(sizes) // count for index in range(count)]
        rows: list[dict[str, Any]] = [
            {
                "group_id": groups[i].group_id,
                "rollout": index,
                "env": groups[i].env,
                "example": groups[i].example,
                "identity": self._identities.get(groups[i].env),
                "reward": rollout.reward,
                **_credit(groups[i], index, advantages[i]),
                "metrics": rollout.metrics,
                "weights": rollout.weights,
                "is_truncated": rollout.is_truncated,
                "min_version": min(int(s.versions[s.versions >= 0].min()) for s in rollout.samples),
                "max_version": max(int(s.versions.max()) for s in rollout.samples),
                "answer": rollout.answer,
                "messages": rollout.conversation,
                **({"tools": rollout.tools} if rollout.tools else {}),
            }
            for i in chosen
            for index, rollout in enumerate(groups[i].rollouts)
        ]
        with wrap_os_errors("write the samples of a batch", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if self._num_files is not None:
            oldest = max(0, step + 1 - self._num_files)
            for old in range(self._oldest, oldest):
                if self._interval is None or old % self._interval:
                    self._paths.samples(old).unlink(missing_ok=True)
                    (self._paths.rollouts(old) / SHOWN_FILE).unlink(missing_ok=True)
            self._oldest = oldest
        return rows


def _credit(group: Group, index: int, advantages: NDArray[np.float64]) -> dict[str, Any]:
    """Return the mean advantage of a rollout, and its credits with their advantages if it has any."""
    credits, (start, end) = group.rollouts[index].credits, group.part_offsets[index : index + 2]
    fields: dict[str, Any] = {"advantage": float(advantages[start:end].mean())}
    if credits:
        fields["credits"] = [
            {"name": credit.name, "reward": credit.reward, "advantage": float(advantage)}
            for credit, advantage in zip(credits, advantages[start:end], strict=True)
        ]
    return fields


class RunWarnings:
    """Writes warnings for the user, which the console, `doctor` and the page show, one JSON object a line.

    A warning is due at the 1st, 10th, 100th ... event of a kind in an environment.

    {"time": unix s, "kind": ..., "env": ..., "count": ..., "text": ..., "cause": ...}

    `cause`, of a failed group, is `text` without the count. `kind` is `group` (a group failed), `worker` (a worker
    died), `wait` (a group holds up a batch), `signal` (nothing to learn), `credit` (parts without a counterpart),
    `data` (the examples of an environment changed), `logger` (a service of a monitor does not answer) or `resume`
    (settings changed).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts = Counter[tuple[str, str]]()
        self._due: list[str] = []
        self._writing: asyncio.Task[None] | None = None

    def add(self, kind: str, env: str, text: Callable[[int], str], cause: str = "") -> None:
        """Count an event; if a warning is due, write what `text` returns for the count. It names cause and remedy."""
        self._counts[kind, env] += 1
        count = self._counts[kind, env]
        if str(count).strip("0") != "1":
            return
        line = {"time": time.time(), "kind": kind, "env": env, "count": count, "text": text(count)}
        line |= {"cause": cause} if cause else {}
        self._due.append(json.dumps(line))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Wait until all warnings are written."""
        if self._writing is not None:
            await self._writing

    async def _write(self) -> None:
        while self._due:
            lines, self._due = self._due, []
            try:
                await asyncio.to_thread(self._append, lines)
            except OSError as error:  # the event is also in the log
                logger.warning("{} cannot be written: {}", self._path, error.strerror)

    def _append(self, lines: list[str]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
