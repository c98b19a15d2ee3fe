"""The order in which the examples of one environment are drawn: shuffled, or from difficulty pools.

Draws depend only on the seed, earlier draws and recorded rewards, so they can be replayed (I3). No I/O, no clock.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from prime_rl.configs.rollouts.buffer import BufferConfig, DifficultyPoolBufferConfig


class DeficitRoundRobin:
    """Chooses among M items so that their counts stay in the ratio of their weights.

    The next choice has the largest deficit w_i (N + 1) - c_i, the first of equals; w_i are the shares, c_i the counts,
    N = sum c_i. The deficits add up to 1, so the largest is positive: no count exceeds its share by more than one, and
    none falls behind by M - 1 or more.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Weights are at least 0 and not all 0, in any unit."""
        self.weights = tuple(weights)
        self.counts = [0] * len(self.weights)

    def next(self) -> int:
        """Return the index of the next choice and count it."""
        total, after = sum(self.weights), sum(self.counts) + 1
        deficits = [weight * after - count * total for weight, count in zip(self.weights, self.counts, strict=True)]
        chosen = deficits.index(max(deficits))
        self.counts[chosen] += 1
        return chosen

    def copy(self) -> "DeficitRoundRobin":
        """Return an independent copy."""
        copied = DeficitRoundRobin(self.weights)
        copied.counts = self.counts.copy()
        return copied


class Shuffled:
    """Every example once per epoch; each epoch is shuffled again."""

    def __init__(self, examples: int, seed: Sequence[int]) -> None:
        """Order `examples` examples; `seed` is at least one number >= 0."""
        self._examples, self._seed = examples, tuple(seed)
        self._drawn = 0
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    def draw(self) -> int:
        """Return the index of the next example."""
        epoch, offset = divmod(self._drawn, self._examples)
        if epoch != self._epoch:
            self._permutation = np.random.default_rng([*self._seed, epoch]).permutation(self._examples)
            self._epoch = epoch
        self._drawn += 1
        return int(self._permutation[offset])

    def update(self, example: int, reward: float) -> None:
        """Do nothing: the order does not depend on rewards."""

    def metrics(self) -> dict[str, float]:
        """Return `epoch`, the number of passes over the examples."""
        return {"epoch": self._drawn / self._examples}

    def state(self) -> dict[str, Any]:
        """Return the JSON-able argument of `restore`."""
        return {"drawn": self._drawn}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore `state`."""
        self._drawn = int(state["drawn"])

    def copy(self) -> "Shuffled":
        """Return an independent copy; the permutation is replaced, never changed."""
        return copy.copy(self)


NORMAL, HARD, EASY = range(3)
POOLS = ("normal", "hard", "easy")
"""Names of the pools, in the order in which they replace an empty pool."""


class DifficultyPools:
    """Draws fixed shares from an easy, a normal and a hard pool.

    All examples start as normal. The mean reward of an example's latest group moves it: at least `easy_threshold` is
    easy, at most `hard_threshold` is hard, else normal.

    Each pool is drawn in passes: it is shuffled, drawn one by one, then shuffled again. An example that moves into a
    pool waits for the next pass.

    If the chosen pool is empty, the first non-empty pool in the order of `POOLS` replaces it, and the draw is counted
    (`fallbacks`). The draw still counts for the share of the empty pool, so later batches do not catch up.
    """

    def __init__(self, examples: int, config: DifficultyPoolBufferConfig, seed: Sequence[int]) -> None:
        """Order `examples` examples; `seed` is at least one number >= 0."""
        self._config, self._seed = config, tuple(seed)
        self._shares = DeficitRoundRobin(
            (1 - config.easy_fraction - config.hard_fraction, config.hard_fraction, config.easy_fraction)
        )
        self._pools = [_Pool((*self._seed, pool)) for pool in range(len(POOLS))]
        self._pool_of = bytearray([NORMAL]) * examples
        for example in range(examples):
            self._pools[NORMAL].add(example)
        self._fallbacks = 0

    def draw(self) -> int:
        """Return the index of the next example."""
        wanted = self._shares.next()
        self._fallbacks += not self._pools[wanted]
        return next(pool for pool in (self._pools[wanted], *self._pools) if pool).draw()

    def update(self, example: int, reward: float) -> None:
        """Move `example` to the pool of its mean reward."""
        easy, hard = self._config.easy_threshold, self._config.hard_threshold
        old, new = self._pool_of[example], EASY if reward >= easy else HARD if reward <= hard else NORMAL
        if new != old:
            self._pools[old].remove(example)
            self._pools[new].add(example)
            self._pool_of[example] = new

    def metrics(self) -> dict[str, float]:
        """Return the sizes of the pools, and the number of draws that replaced an empty pool."""
        sizes = {name: float(len(pool)) for name, pool in zip(POOLS, self._pools, strict=True)}
        return sizes | {"fallbacks": self._fallbacks}

    def state(self) -> dict[str, Any]:
        """Return the JSON-able argument of `restore`."""
        return {
            "counts": list(self._shares.counts),
            "fallbacks": self._fallbacks,
            "pools": [pool.state() for pool in self._pools],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore `state`."""
        self._shares.counts = list(state["counts"])
        self._fallbacks = int(state["fallbacks"])
        for index, (pool, saved) in enumerate(zip(self._pools, state["pools"], strict=True)):
            pool.restore(saved)
            for example in pool:
                self._pool_of[example] = index

    def copy(self) -> "DifficultyPools":
        """Return an independent copy."""
        copied = copy.copy(self)
        copied._shares = self._shares.copy()
        copied._pools = [pool.copy() for pool in self._pools]
        copied._pool_of = self._pool_of.copy()
        return copied


class _Pool:
    """A set of examples that is drawn in shuffled passes.

    Copies share the order of a pass, which never changes; `_left` holds its examples that left the pool since. An
    example that returns waits for the next pass (`_behind`).
    """

    def __init__(self, seed: Sequence[int]) -> None:
        self._seed = tuple(seed)
        self._passes = 0
        self._order: list[int] = []
        self._next = 0
        self._left = set[int]()
        self._behind: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._order) - self._next - len(self._left) + len(self._behind)

    def __iter__(self) -> Iterator[int]:
        yield from self._upcoming()
        yield from self._behind

    def add(self, example: int) -> None:
        self._behind[example] = None

    def remove(self, example: int) -> None:
        if example in self._behind:
            del self._behind[example]
        else:
            self._left.add(example)

    def draw(self) -> int:
        while True:
            if self._next == len(self._order):
                rng = np.random.default_rng([*self._seed, self._passes])
                self._order, self._next = rng.permutation(np.fromiter(self._behind, np.int64)).tolist(), 0
                self._behind = {}
                self._passes += 1
            example = self._order[self._next]
            self._next += 1
            if example not in self._left:
                self._behind[example] = None
                return example
            self._left.remove(example)

    def state(self) -> dict[str, Any]:
        return {"passes": self._passes, "upcoming": self._upcoming(), "behind": list(self._behind)}

    def restore(self, state: dict[str, Any]) -> None:
        self._passes = int(state["passes"])
        self._order, self._next, self._left = list(state["upcoming"]), 0, set()
        self._behind = dict.fromkeys(state["behind"])

    def copy(self) -> "_Pool":
        copied = copy.copy(self)
        copied._left, copied._behind = self._left.copy(), self._behind.copy()
        return copied

    def _upcoming(self) -> list[int]:
        upcoming = self._order[self._next :]
        return [example for example in upcoming if example not in self._left] if self._left else upcoming


ExampleOrder = Shuffled | DifficultyPools
"""The order of one environment's examples; `copy` takes milliseconds, also for a million examples."""


def make_order(examples: int, buffer: BufferConfig, seed: Sequence[int]) -> ExampleOrder:
    """Build the order that `buffer` names, over `examples` examples."""
    if isinstance(buffer, DifficultyPoolBufferConfig):
        return DifficultyPools(examples, buffer, seed)
    return Shuffled(examples, seed)
