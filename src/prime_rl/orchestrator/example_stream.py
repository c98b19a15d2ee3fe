"""The infinite stream of examples, a function of seed, position and pool state (I3). No I/O, no clock."""

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prime_rl.configs.buffer import (
    BufferConfig,
    CurriculumBufferConfig,
    DifficultyPoolBufferConfig,
    SimpleBufferConfig,
)
from prime_rl.core.errors import ConfigError
from prime_rl.orchestrator.curriculum import Curriculum

_CONTENT = "content"


@dataclass(frozen=True, slots=True)
class StreamEnvironment:
    """One environment of the mixture: its name, which seeds the order, number of examples, share of the groups, a hash
    of its examples, and those that are never drawn, in order.
    """

    name: str
    examples: int
    weight: float = 1.0
    buffer: BufferConfig = field(default_factory=SimpleBufferConfig)
    content_hash: str = ""
    skipped: tuple[int, ...] = ()

    @property
    def num_drawn(self) -> int:
        """Number of examples that are drawn."""
        return self.examples - len(self.skipped)


@dataclass(frozen=True, slots=True)
class DrawnExample:
    """The example at one position of the stream: its index in the environment with index `env`."""

    group_id: int
    env: int
    example: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a position: shipped if `reason` is None, else dropped. `reward` is None after an error."""

    draw: DrawnExample
    reward: float | None
    reason: str | None


class ExampleStream:
    """Draws positions from a mixture of environments, in the ratio of their weights.

    `DeficitRoundRobin` chooses the environment, `ExampleOrder` the example. An environment that may not start
    (`can_start`) passes its turn on to the next. The turn counts as taken, so it is not made up for later: with N
    turns, c of them of an environment with share w, and M environments, |c - w N| <= M - 1 holds. The same holds for
    positions if no turn is passed on.

    The order of examples changes only in `draw` and, once per batch, in `shipped`. So draws depend on which
    environments may start, but not on the order in which rollouts finish. Drawing again for the recorded environments,
    and shipping in the recorded order, gives the same stream.
    """

    def __init__(self, sources: Sequence[StreamEnvironment], seed: int) -> None:
        """Start at position 0; `seed` is for orders whose buffer has no seed. Raises ConfigError."""
        self.sources = tuple(sources)
        self.position = 0
        self.warnings: dict[str, str] = {}
        """What `check_identity` found, by environment."""
        self.passed = [0] * len(self.sources)
        """Turns of each environment that were passed on to others."""
        names = [source.name for source in self.sources]
        if not names:
            raise ConfigError("orchestrator.env is empty; add an environment")
        for source in self.sources:
            if names.count(source.name) > 1:
                raise ConfigError(f"two environments are called {source.name!r}; give each a different env.name")
            if source.num_drawn < 1:
                raise ConfigError(f"environment {source.name!r} has no examples")
            if source.weight <= 0:
                raise ConfigError(f"environment {source.name!r} has weight {source.weight}; it must be above 0")
        self._seeds = [seed if source.buffer.seed is None else source.buffer.seed for source in self.sources]
        self._shares = DeficitRoundRobin([source.weight for source in self.sources])
        self._orders = [
            make_order(source.num_drawn, source.buffer, (own % 2**64, zlib.crc32(source.name.encode())), source.name)
            for source, own in zip(self.sources, self._seeds, strict=True)
        ]
        self._numbers = [np.delete(np.arange(source.examples), source.skipped) for source in self.sources]
        """Of each environment, the examples that its order numbers from 0."""

    def draw(self, can_start: Callable[[int], bool] = lambda env: True) -> DrawnExample:
        """Return the next position for an environment, by its index, that `can_start`; ValueError if none can."""
        if not any(can_start(env) for env in range(len(self.sources))):
            raise ValueError("no environment can start a group")
        while not can_start(env := self._shares.next()):
            self.passed[env] += 1
        draw = DrawnExample(self.position, env, int(self._numbers[env][self._orders[env].draw()]))
        self.position += 1
        return draw

    def shipped(self, ended: Sequence[Ended]) -> None:
        """Update the difficulty pools with all positions that ended since the last ship, by ascending group_id."""
        for end in ended:
            if end.reward is not None:
                env = end.draw.env
                self._orders[env].update(int(np.searchsorted(self._numbers[env], end.draw.example)), end.reward)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the orders and the number of passed turns, as `stream/<env>/<name>`."""
        metrics = {
            f"stream/{source.name}/{name}": value
            for source, order in zip(self.sources, self._orders, strict=True)
            for name, value in order.metrics().items()
        }
        passed = zip(self.sources, self.passed, strict=True) if len(self.sources) > 1 else ()
        return metrics | {f"stream/{source.name}/passed_turns": float(count) for source, count in passed}

    def identity(self) -> dict[str, Any]:
        """Return the settings that the draws depend on, by their names for an error message."""
        named: dict[str, Any] = {"environments": ", ".join(source.name for source in self.sources)}
        for source, seed in zip(self.sources, self._seeds, strict=True):
            values: dict[str, Any] = {"examples": source.num_drawn, "weight": source.weight, "seed": seed}
            values |= {_CONTENT: source.content_hash} if source.content_hash else {}
            if source.skipped:
                values["skipped"] = zlib.crc32(np.array(source.skipped, "<i8").tobytes())
            if isinstance(source.buffer, DifficultyPoolBufferConfig | CurriculumBufferConfig):
                values |= source.buffer.model_dump(exclude={"seed", "online_difficulty_filtering"})
            named |= {f"{name} of {source.name}": value for name, value in values.items()}
        return named

    def check_identity(self, earlier: Mapping[str, Any]) -> None:
        """Raise ConfigError if `earlier` differs from the identity of this stream; other examples are a warning."""
        now = self.identity()
        for name in dict.fromkeys([*earlier, *now]):
            if name.startswith(_CONTENT):
                if name in earlier and name in now and earlier[name] != now[name]:
                    env = name.removeprefix(f"{_CONTENT} of ")
                    self.warnings[env] = (
                        f"environment {env}: its examples differ from those when the run began; what is known about "
                        "an example by its number (epoch, difficulty, duration) is about another one"
                    )
            elif earlier.get(name) != now.get(name):
                raise ConfigError(
                    f"{name} was {earlier.get(name)!r} when the run began and is {now.get(name)!r} now, which would "
                    "change the examples of the stream; resume with the earlier value"
                )

    def state(self) -> dict[str, Any]:
        """Return the JSON-able argument of `restore`."""
        return {
            "identity": self.identity(),
            "position": self.position,
            "counts": list(self._shares.counts),
            "passed": list(self.passed),
            "orders": [order.state() for order in self._orders],
        }

    def copy(self) -> "ExampleStream":
        """Return an independent copy in milliseconds, also for a million examples."""
        copied = copy.copy(self)
        copied.passed = self.passed.copy()
        copied._shares = self._shares.copy()
        copied._orders = [order.copy() for order in self._orders]
        return copied

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; if weights have changed or environments were added at the end, shares are counted from zero.

        Raises:
            ConfigError: another change of the mixture.
        """
        count = len(state["orders"])
        now, earlier = self.identity(), dict(state["identity"])
        names, weights = [source.name for source in self.sources], list[float]()
        if earlier["environments"] == ", ".join(names[:count]):
            weights = [earlier[f"weight of {name}"] for name in names[:count]]
            allowed = ("environments", *(f" of {name}" for name in names[count:]))
            earlier |= {k: now[k] for k in now if k.startswith("weight of ") or k.endswith(allowed)}
        self.check_identity(earlier)
        self.position = int(state["position"])
        if tuple(weights) == self._shares.weights:
            self._shares.counts = list(state["counts"])
        added = [0] * (len(names) - count)
        self.passed = [*state.get("passed", [0] * count), *added]
        for order, saved in zip(self._orders, state["orders"], strict=False):
            order.restore(saved)


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


ExampleOrder = Shuffled | DifficultyPools | Curriculum
"""The order of one environment's examples; `copy` takes milliseconds, also for a million examples."""


def make_order(examples: int, buffer: BufferConfig, seed: Sequence[int], env: str) -> ExampleOrder:
    """Build the order that `buffer` names, over the `examples` examples of an environment. Raises ConfigError."""
    if isinstance(buffer, CurriculumBufferConfig):
        return Curriculum(examples, buffer, seed, env)
    if isinstance(buffer, DifficultyPoolBufferConfig):
        return DifficultyPools(examples, buffer, seed)
    return Shuffled(examples, seed)
