"""Seeded rollout lengths for the simulation and for the real orchestrator.

The duration of a rollout depends only on (seed, example, group_id, rollout), not on the order of groups or the clock.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from prime_rl.orchestrator.example_stream import DrawnExample, ExampleStream, StreamEnvironment


@dataclass(frozen=True)
class Workload:
    """Sizes, lengths and speeds of a simulated run.

    Lengths are lognormal, cut at `max_tokens`: log(tokens) is log(median) + a term of the example + one of the rollout.

    Attributes:
        batch_groups: groups in a batch, B.
        group_size: rollouts in a group, G.
        waves: rollouts of a batch that each slot of the engine samples one after the other: slots = B * G / waves.
        steps: total number of batches, M.
        warmup_steps: first batches, which are not measured.
        t_infer: seconds that the engine takes for a batch of this trace with all slots busy.
        t_train: seconds of a training step.
        t_switch: seconds from the end of a training step until the engine samples from its version.
        median_tokens: median length of the rollouts.
        max_tokens: maximum length of a rollout.
        example_sigma: standard deviation of the example's term.
        rollout_sigma: standard deviation of the rollout's term.
        examples: number of examples of the data set, which the stream repeats.
        drop_share: fraction of groups that are dropped at random when they complete.
        wait: mean time that a rollout waits for its environment, relative to its mean time in the engine. The waits are
            lognormal with the same terms as the lengths, and independent of them. A waiting rollout keeps its slot.
    """

    batch_groups: int = 32
    group_size: int = 8
    waves: float = 4
    steps: int = 80
    warmup_steps: int = 16
    t_infer: float = 1.0
    t_train: float = 1.0
    t_switch: float = 0.01
    median_tokens: float = 700
    max_tokens: int = 8192
    example_sigma: float = 0.6
    rollout_sigma: float = 0.53
    examples: int = 256
    drop_share: float = 0.0
    wait: float = 0.0

    @property
    def slots(self) -> int:
        """Rollouts that the engine samples at once."""
        return round(self.batch_groups * self.group_size / self.waves)


class Trace:
    """Length and duration of every rollout of a workload."""

    ENVIRONMENT = "trace"
    """Name of the environment; the order of the stream depends on it."""

    def __init__(self, workload: Workload, seed: int) -> None:
        """Compute the lengths of all groups of the batches in the order of the stream."""
        self.workload = workload
        self.seed = seed
        rng = np.random.default_rng([seed, 0])
        self._factors = np.log(workload.median_tokens) + workload.example_sigma * rng.normal(size=workload.examples)
        self._lengths: dict[int, NDArray[np.int64]] = {}
        first = islice(self.draws(), workload.steps * workload.batch_groups)
        self._sampled = np.stack([self.lengths(draw) for draw in first])
        self._waits = workload.example_sigma * np.random.default_rng([seed, 4]).normal(size=workload.examples)

    def draws(self) -> Iterator[DrawnExample]:
        """Yield the stream of the trace, as an orchestrator with this seed draws it."""
        stream = ExampleStream([StreamEnvironment(self.ENVIRONMENT, self.workload.examples)], self.seed)
        while True:
            yield stream.draw()

    def lengths(self, draw: DrawnExample) -> NDArray[np.int64]:
        """Return the sampled tokens of a group's rollouts, int64 [G], each at least 1."""
        if draw.group_id not in self._lengths:
            rng = np.random.default_rng([self.seed, 1, draw.group_id])
            factors = self._factors[draw.example] + self.workload.rollout_sigma * rng.normal(
                size=self.workload.group_size
            )
            tokens = np.clip(np.rint(np.exp(factors)), 1, self.workload.max_tokens).astype(np.int64)
            self._lengths[draw.group_id] = tokens
        return self._lengths[draw.group_id]

    def seconds(self, draw: DrawnExample) -> NDArray[np.float64]:
        """Return the time of each rollout of a group in engine and environment, seconds, float64 [G]."""
        return self.lengths(draw) * self.seconds_per_token + self.waits(draw)

    def waits(self, draw: DrawnExample) -> NDArray[np.float64]:
        """Return how long each rollout of a group waits for its environment, seconds, float64 [G]."""
        work = self.workload
        if not work.wait:
            return np.zeros(work.group_size)
        terms = np.random.default_rng([self.seed, 5, draw.group_id]).normal(size=work.group_size)
        mean = work.wait * self.mean_tokens * self.seconds_per_token
        variance = work.example_sigma**2 + work.rollout_sigma**2
        return mean * np.exp(self._waits[draw.example] + work.rollout_sigma * terms - variance / 2)

    def error(self, draw: DrawnExample) -> float:
        """Return a standard normal number of the group, for expectations with a known error."""
        return float(np.random.default_rng([self.seed, 2, draw.group_id]).normal())

    def is_dropped(self, draw: DrawnExample) -> bool:
        """Return whether the group is dropped when it completes."""
        share = self.workload.drop_share
        return share > 0 and bool(np.random.default_rng([self.seed, 3, draw.group_id]).random() < share)

    @cached_property
    def mean_tokens(self) -> float:
        """Mean length of the rollouts that the batches take in the order of the stream."""
        return float(self._sampled.mean())

    @cached_property
    def seconds_per_token(self) -> float:
        """Seconds per token of a slot, so that a batch takes `t_infer` with all slots busy."""
        work = self.workload
        rollouts = work.batch_groups * work.group_size
        return work.t_infer * work.slots / (rollouts * self.mean_tokens * (1 + work.wait))

    @cached_property
    def kept_share(self) -> float:
        """Fraction of the sampled tokens that is not dropped."""
        work = self.workload
        draws = list(islice(self.draws(), round(work.steps * work.batch_groups / (1 - work.drop_share))))
        tokens = np.array([self.lengths(draw).sum() for draw in draws])
        kept = np.array([not self.is_dropped(draw) for draw in draws])
        return float(tokens[kept].sum() / tokens.sum())

    def ideal(self) -> float:
        """Return max(t_train, t_infer), seconds per step."""
        return max(self.workload.t_train, self.workload.t_infer / self.kept_share)

    def limit(self, bound: int) -> float:
        """Return t* = max(t_train, t_infer, (D_max + t_train + t_switch) / (bound + 1)), seconds per step."""
        work = self.workload
        first = islice(self.draws(), work.steps * work.batch_groups)
        longest = float(max(self.seconds(draw).max() for draw in first))
        return max(self.ideal(), (longest + work.t_train + work.t_switch) / (bound + 1))
