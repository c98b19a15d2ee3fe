"""Orders the positions to start: groups with long expected rollouts first. No I/O, no clock."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from prime_rl.orchestrator.data.example_stream import DrawnExample

_OVERDUE_BATCHES = 2
"""A position is overdue when this many batches' worth of positions were drawn after it."""

_ENVIRONMENT_WINDOW = 256
"""Number of groups in the running mean of an environment's length."""

_EXAMPLE_WEIGHT = 0.5
"""Weight of an example's newest group in its history; the policy changes in the epoch between two groups."""

_position = attrgetter("group_id")


class Lookahead:
    """Chooses the next position to start from a pool of up to B drawn positions.

    B is the number of groups in a batch. In steady state B groups start in each version window, the time between two
    weight updates. All have the same deadline, so groups that start late in the window have less time. Therefore each
    window starts its B positions in the order of descending expected length.

    The scheduler's `placed` (groups shipped, or admitted and not dropped) identifies the window: places w * B to
    (w + 1) * B - 1 are window w. At the first place of a window the pool is filled up to B draws. With r places of the
    window left, the r-th shortest position starts, or the longest if the pool holds fewer than r. Without drops this is
    the sorted order. A drop returns a place, so the pool becomes empty before the window ends; it is then filled again,
    the r shortest of the new positions end the window, and the longer ones start the next.

    The pool is emptied before it is filled, except at the start of a window, so a position starts before another 2B are
    drawn. After a restart `placed` may jump; positions that are overdue by 2B draws then start first, and none waits
    for 4B.

    A position whose environment may not start (`can_start`) stays in the pool in addition to the B. There are at most B
    of them per environment, since nothing is drawn for an environment that may not start.

    Example, B = 4, expected lengths 5 9 1 7 | 2 2 8 3: the order is 9 7 5 1 | 8 3 2 2. If the group of length 7 is
    dropped when one place of the first window is left, two are left: 9 7 5 1, then 2 as the shortest of 2 2 8 3; the
    next window starts with 8.
    """

    def __init__(
        self,
        draw: Callable[[], DrawnExample],
        expected: Callable[[DrawnExample], float | None],
        batch_groups: int,
        length_aware: bool = True,
    ) -> None:
        """Start with an empty pool.

        Args:
            draw: draws the next position of the stream.
            expected: returns the expected longest rollout of a group, in any unit; None counts as longest.
            batch_groups: B >= 1.
            length_aware: False keeps the order of the stream and draws nothing ahead.
        """
        self._draw = draw
        self._expected = expected
        self._batch_groups = batch_groups
        self._length_aware = length_aware
        self._pool: list[DrawnExample] = []
        """Sorted by descending expected length at the time of the last draw; ties in the order of the stream."""
        self._window = -1
        self._latest = -1

    def restore(self, waiting: Sequence[DrawnExample]) -> None:
        """Restore positions that an earlier process drew and did not start."""
        self._pool = list(waiting)
        self._latest = max((draw.group_id for draw in waiting), default=-1)
        self._sort()

    def next(self, placed: int, can_start: Callable[[DrawnExample], bool] = lambda draw: True) -> DrawnExample:
        """Return the position to start now, if the scheduler admits a group; newly drawn positions must `can_start`."""
        pool = [draw for draw in self._pool if can_start(draw)]
        if not self._length_aware:
            return self._take(min(pool, key=_position)) if pool else self._draw()
        window = placed // self._batch_groups
        if window > self._window or not pool:
            self._window = max(window, self._window)
            self._top_up(self._batch_groups - len(pool))
            pool = [draw for draw in self._pool if can_start(draw)]
        oldest = min(pool, key=_position)
        if self._latest - oldest.group_id >= _OVERDUE_BATCHES * self._batch_groups:
            return self._take(oldest)
        filled = max(0, placed - self._window * self._batch_groups)
        return self._take(pool[max(0, len(pool) - (self._batch_groups - filled))])

    def _take(self, draw: DrawnExample) -> DrawnExample:
        self._pool.remove(draw)
        return draw

    def _top_up(self, count: int) -> None:
        for _ in range(count):
            self._pool.append(self._draw())
            self._latest = self._pool[-1].group_id
        self._sort()

    def _sort(self) -> None:
        def longest_first(draw: DrawnExample) -> tuple[float, int]:
            expected = self._expected(draw)
            return (-float("inf") if expected is None else -expected, draw.group_id)

        self._pool.sort(key=longest_first)


@dataclass(frozen=True, slots=True)
class _Mean:
    value: float = 0.0
    count: int = 0

    def with_one(self, value: float, weight: float) -> "_Mean":
        """Return the mean with one more value; immutable, so copies of a history share it."""
        count = self.count + 1
        return _Mean(self.value + (value - self.value) * max(weight, 1 / count), count)


class LengthHistory:
    """Expected length of a group: from earlier groups of its example, else the running mean of its environment.

    The length of a group is that of its longest rollout, for which the batch waits.
    """

    def __init__(self) -> None:
        self._examples: dict[str, dict[int, _Mean]] = {}
        self._environments: dict[str, _Mean] = {}

    def add(self, env: str, example: int, longest: float) -> None:
        """Add a finished group, whose longest rollout had `longest` sampled tokens."""
        examples = self._examples.setdefault(env, {})
        examples[example] = examples.get(example, _Mean()).with_one(longest, _EXAMPLE_WEIGHT)
        mean = self._environments.get(env, _Mean())
        self._environments[env] = mean.with_one(longest, 1 / _ENVIRONMENT_WINDOW)

    def copy(self) -> "LengthHistory":
        """Return an independent copy in milliseconds, also for a million examples."""
        copied = LengthHistory()
        copied._environments = self._environments.copy()
        copied._examples = {env: examples.copy() for env, examples in self._examples.items()}
        return copied

    def expected(self, env: str, example: int) -> float | None:
        """Return the expected length of the longest rollout in tokens; None if the environment is unknown."""
        known = self._examples.get(env, {}).get(example) or self._environments.get(env)
        return known.value if known else None

    def state(self) -> dict[str, Any]:
        """Return the JSON-able argument of `restore`."""
        return {
            env: {
                "mean": [mean.value, mean.count],
                "examples": [[example, m.value, m.count] for example, m in self._examples[env].items()],
            }
            for env, mean in self._environments.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self._environments = {env: _Mean(*saved["mean"]) for env, saved in state.items()}
        self._examples = {
            env: {example: _Mean(value, count) for example, value, count in saved["examples"]}
            for env, saved in state.items()
        }
