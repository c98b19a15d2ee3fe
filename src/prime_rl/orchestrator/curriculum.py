"""The order of examples by a function of the user (`buffer.type = "curriculum"`): its input, and the draws (I3)."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_rl.configs.buffer import CurriculumBufferConfig
from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.core.import_utils import check_call, load_function


@dataclass(frozen=True, slots=True)
class ExampleResults:
    """What is known about the N examples of an environment when a curriculum weights them; read-only arrays [N].

    Attributes:
        env: name of the environment.
        draws: groups that were started, int64.
        groups: groups that ended with a reward, also dropped ones, int64.
        mean: mean over these groups of their mean rewards, float64; NaN without one.
        last: mean reward of the latest of these groups, float64; NaN without one.
    """

    env: str
    draws: NDArray[np.int64]
    groups: NDArray[np.int64]
    mean: NDArray[np.float64]
    last: NDArray[np.float64]


class Curriculum:
    """Draws examples by the weights [N] that a function of the user gives them.

    The function is called for the first draw, and for the first one after each batch with new results. The weights make
    a random order without repetition, in which an example comes first with a probability in proportion to its weight
    (Efraimidis and Spirakis 2006). It is repeated if all examples with a weight were drawn. Weight 0 excludes one,
    unless all are 0, as of examples that are all solved.
    """

    def __init__(self, examples: int, config: CurriculumBufferConfig, seed: Sequence[int], env: str) -> None:
        """Raises ConfigError if the function cannot be imported or called."""
        self._env, self._config, self._seed = env, config, tuple(seed)
        self._who = f"orchestrator.buffer.import_path = {config.import_path!r}"
        self._function = load_function(config.import_path, "orchestrator.buffer.import_path")
        check_call(self._function, 1, config.kwargs, self._who)
        self._draws, self._groups = np.zeros(examples, np.int64), np.zeros(examples, np.int64)
        self._sums, self._last = np.zeros(examples), np.full(examples, np.nan)
        self._num_orders, self._warned = 0, False
        self._upcoming: list[int] | None = None
        """The rest of the order, reversed; None if the weights are out of date."""

    def draw(self) -> int:
        """Return the index of the next example. Raises ConfigError as `weights`."""
        if not self._upcoming:
            weights = self.weights()
            (chosen,) = weights.nonzero()
            noise = np.random.default_rng([*self._seed, self._num_orders]).gumbel(size=len(weights))
            keys = np.log(weights[chosen]) + noise[chosen]
            self._upcoming = chosen[np.argsort(keys, kind="stable")].tolist()
            self._num_orders += 1
        example = self._upcoming.pop()
        self._draws[example] += 1
        return example

    def weights(self) -> NDArray[np.float64]:
        """Call the function, twice: other weights the second time could not be drawn again after a restart.

        Raises:
            ConfigError: the function raises, or its weights are not finite, negative, or not always the same.
        """
        count, first = len(self._draws), self._call()
        if first.shape != (count,):
            raise ConfigError(f"{self._who} returned shape {first.shape} for {count} examples; return one weight each")
        if not (np.isfinite(first).all() and (first >= 0).all()):
            raise ConfigError(
                f"{self._who} returned weights that are negative or not finite, from {first.min()} to {first.max()}"
            )
        if not np.array_equal(first, self._call()):
            raise ConfigError(
                f"{self._who} returned other weights for the same results; it must depend on its arguments only, and "
                "needs no random numbers: the weights are probabilities"
            )
        if first.any():
            return first
        if not self._warned:
            logger.warning("{} returned only zeros for {}; all examples get equal weights", self._who, self._env)
            self._warned = True
        return np.ones(count)

    def _call(self) -> NDArray[np.float64]:
        with np.errstate(invalid="ignore"):
            mean = self._sums / self._groups
        arrays = [self._draws.copy(), self._groups.copy(), mean, self._last.copy()]
        for array in arrays:
            array.flags.writeable = False
        try:
            answer = self._function(ExampleResults(self._env, *arrays), **self._config.kwargs)
            return np.array(answer, np.float64)
        except (Exception, SystemExit) as error:  # user code
            raise ConfigError(f"{self._who} raised {summarize_exception(error, location=True)}") from error

    def update(self, example: int, reward: float) -> None:
        """Add a result; the next draw calls the function again."""
        self._groups[example] += 1
        self._sums[example] += reward
        self._last[example] = reward
        self._upcoming = None

    def metrics(self) -> dict[str, float]:
        """Return `epoch`, draws per example, and the number of examples with a result."""
        return {"epoch": float(self._draws.sum()) / len(self._draws), "seen": float(np.count_nonzero(self._groups))}

    def state(self) -> dict[str, Any]:
        """Return the JSON-able argument of `restore`."""
        (drawn,) = self._draws.nonzero()
        rows = zip(drawn, self._draws[drawn], self._groups[drawn], self._sums[drawn], self._last[drawn], strict=True)
        drawn_rows = [[int(i), int(n), int(g), float(s), float(r) if g else None] for i, n, g, s, r in rows]
        return {"orders": self._num_orders, "upcoming": self._upcoming, "drawn": drawn_rows}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore `state`."""
        self._num_orders, self._upcoming = int(state["orders"]), state["upcoming"] and list(state["upcoming"])
        for example, draws, groups, total, last in state["drawn"]:
            self._draws[example], self._groups[example], self._sums[example] = draws, groups, total
            self._last[example] = np.nan if last is None else last

    def copy(self) -> "Curriculum":
        """Return an independent copy."""
        copied = copy.copy(self)
        copied._draws, copied._groups = self._draws.copy(), self._groups.copy()
        copied._sums, copied._last = self._sums.copy(), self._last.copy()
        copied._upcoming = self._upcoming and self._upcoming.copy()
        return copied
