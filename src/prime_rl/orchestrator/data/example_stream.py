"""The infinite stream of examples, a function of seed, position and pool state (I3). No I/O, no clock."""

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_rl.configs.rollouts.buffer import BufferConfig, DifficultyPoolBufferConfig, SimpleBufferConfig
from prime_rl.core.errors import ConfigError
from prime_rl.orchestrator.data.example_order import DeficitRoundRobin, make_order


@dataclass(frozen=True, slots=True)
class StreamEnvironment:
    """One environment of the mixture: its name, which seeds the order, number of examples, and share of the groups."""

    name: str
    examples: int
    weight: float = 1.0
    buffer: BufferConfig = field(default_factory=SimpleBufferConfig)


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
        self.passed = [0] * len(self.sources)
        """Turns of each environment that were passed on to others."""
        names = [source.name for source in self.sources]
        if not names:
            raise ConfigError("orchestrator.env is empty; add an environment")
        for source in self.sources:
            if names.count(source.name) > 1:
                raise ConfigError(f"two environments are called {source.name!r}; give each a different env.name")
            if source.examples < 1:
                raise ConfigError(f"environment {source.name!r} has no examples")
            if source.weight <= 0:
                raise ConfigError(f"environment {source.name!r} has weight {source.weight}; it must be above 0")
        self._seeds = [seed if source.buffer.seed is None else source.buffer.seed for source in self.sources]
        self._shares = DeficitRoundRobin([source.weight for source in self.sources])
        self._orders = [
            make_order(source.examples, source.buffer, (own % 2**64, zlib.crc32(source.name.encode())))
            for source, own in zip(self.sources, self._seeds, strict=True)
        ]

    def draw(self, can_start: Callable[[int], bool] = lambda env: True) -> DrawnExample:
        """Return the next position for an environment, by its index, that `can_start`; ValueError if none can."""
        if not any(can_start(env) for env in range(len(self.sources))):
            raise ValueError("no environment can start a group")
        while not can_start(env := self._shares.next()):
            self.passed[env] += 1
        draw = DrawnExample(self.position, env, self._orders[env].draw())
        self.position += 1
        return draw

    def shipped(self, ended: Sequence[Ended]) -> None:
        """Update the difficulty pools with all positions that ended since the last ship, by ascending group_id."""
        for end in ended:
            if end.reward is not None:
                self._orders[end.draw.env].update(end.draw.example, end.reward)

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
            values: dict[str, Any] = {"examples": source.examples, "weight": source.weight, "seed": seed}
            if isinstance(source.buffer, DifficultyPoolBufferConfig):
                values |= source.buffer.model_dump(exclude={"seed", "online_difficulty_filtering"})
            named |= {f"{name} of {source.name}": value for name, value in values.items()}
        return named

    def check_identity(self, earlier: Mapping[str, Any]) -> None:
        """Raise ConfigError if `earlier` differs from the identity of this stream."""
        now = self.identity()
        for name in dict.fromkeys([*earlier, *now]):
            if earlier.get(name) != now.get(name):
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
        """Restore `state`. Weights may have changed and environments been added at the end: shares then count anew.

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
