"""Decides which groups may start, in which order, and which groups form batch n (I1). No I/O, no clock.

`DeadlineScheduler` keeps the staleness bound; `Lookahead` chooses the next position with the help of `DurationHistory`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain
from operator import attrgetter
from typing import Any

from prime_rl.orchestrator.example_stream import DrawnExample

UNBOUNDED = float("inf")


@dataclass(slots=True)
class _Entry:
    version: int
    deadline: int
    complete: bool = False


class DeadlineScheduler:
    """Admits groups and picks batches so that no token of batch n is older than version n - m. No I/O, no clock.

    Symbols: n the next batch to ship, B groups a batch, M batches in all, k = `async_level` the pace at which groups
    start, m = `max_off_policy_steps` the bound, m >= k and m = k unless set. A group that starts while its server
    samples from version v gets the deadline d = v + m, the last batch that it may join. Its tokens come from version v
    or newer, so their staleness in batch n <= d is at most n - v <= m. The bound holds if every group ships by its
    deadline, which is possible if the groups due by e fit into the batches left until e:

        F:  for every e >= n:   #{unshipped groups with deadline <= e}  <=  (min(e, M - 1) - n + 1) * B

    Each transition keeps F:

        admit    at v, if for every e >= v + k >= n:
                     #{unshipped, version <= e - k} + 1  <=  (min(e, M - 1) - n + 1) * B + credit      (the pace)
                 and for every e >= v + m:
                     #{unshipped, deadline <= e} + 1     <=  (min(e, M - 1) - n + 1) * B               (F itself)
        ship     the B complete groups with the earliest deadlines, if F holds for the rest with n + 1 in place of n;
                 otherwise wait for a group with an earlier deadline
        drop     (error, filter) removes a group, which relaxes F: another may be admitted
        repin    a group whose server was lost starts again on another server at version w: d = w + m, if F holds
                 with it, which is always true for w >= v

          repin
          +---+
          |   v
        admitted --complete--> complete --ship--> trained on
            |                     |
            +---------drop--------+-------------> dropped, under a reason counted by the caller

    With m = k, the pace and F are the same condition. With m > k the pace is stricter (F at e is the pace at e - m +
    k): no more groups are in flight than with m = k, and a batch waits for a straggler m - k batches later.

    F is also necessary: if it fails at e, more groups are due by e than the batches until e can take. So `credit`, the
    groups admitted beyond the pace because drops are expected, never exceeds F. It has no effect at m = k, where the
    pace already allows (k + 1) * B groups in flight.

    Progress: let all groups in flight be complete, U of them unshipped, and all servers at version n < M. If U < B, a
    group can be admitted: both conditions require at most U + 1 <= B. If U >= B, batch n can ship: at each e,
    either all B that ship have deadlines <= e, and both sides of F fall by B, or all with deadlines <= e ship.

    Example, k = m = 1, B = 2: a, b, c, d start at version 0 (d = 1). c and d finish first: batch 0 = {c, d}. Version 1
    is published; e and f start (d = 2). Batch 1 must be {a, b}: it waits for b although a and e are complete. With
    m = 2, a and b have deadline 2, e and f deadline 3: batch 1 is {a, e}, and b joins batch 2.

    Counts are kept per deadline, so the cost of `can_admit` and `ready` does not depend on the groups in flight.
    """

    def __init__(
        self,
        batch_groups: int,
        async_level: int,
        max_steps: int | None = None,
        next_step: int = 0,
        max_off_policy_steps: int | None = None,
        credit: int = 0,
    ) -> None:
        """Start before batch `next_step`. By default M is unlimited, and m = k."""
        self.batch_groups = batch_groups
        self.async_level = async_level
        self.max_off_policy_steps = async_level if max_off_policy_steps is None else max_off_policy_steps
        self.max_steps = max_steps
        self.next_step = next_step
        if self.max_off_policy_steps < async_level:
            raise ValueError(f"max_off_policy_steps {max_off_policy_steps} is below async_level {async_level}")
        self.credit = credit
        self._slack = self.max_off_policy_steps - async_level
        self._entries: dict[int, _Entry] = {}
        self._due: Counter[int] = Counter()
        self._complete: dict[int, set[int]] = {}
        """Complete groups by their deadline."""

    @property
    def credit(self) -> int:
        """Groups that may be admitted beyond the pace because drops are expected; never beyond F. Refused at k = 0."""
        return self._credit

    @credit.setter
    def credit(self, credit: int) -> None:
        if credit and not self.async_level:
            raise ValueError("admission credit needs async_level >= 1: at 0 additional groups fit into no batch")
        if credit < 0:
            raise ValueError(f"admission credit is {credit}, below 0")
        self._credit = credit

    @property
    def in_flight(self) -> int:
        """Groups that were admitted and are not complete."""
        return len(self._entries) - sum(map(len, self._complete.values()))

    @property
    def placed(self) -> int:
        """Groups that have a place in a batch: shipped, or admitted and not dropped."""
        return self.next_step * self.batch_groups + len(self._entries)

    @property
    def finished(self) -> bool:
        """Whether every batch was shipped."""
        return self.max_steps is not None and self.next_step >= self.max_steps

    def version(self, group_id: int) -> int:
        """Return the version at the group's dispatch; no token of it is older."""
        return self._entries[group_id].version

    def deadline(self, group_id: int) -> int:
        """Return the last batch that the group may join."""
        return self._entries[group_id].deadline

    def can_admit(self, version: int) -> bool:
        """Return whether F and the pace allow a group to start now at `version`."""
        pace = version + self.async_level
        return (
            pace >= self.next_step
            and self._fits(self._due, pace, shift=self._slack, extra=self.credit)
            and self._fits(self._due, version + self.max_off_policy_steps)
        )

    def admit(self, group_id: int, version: int) -> int:
        """Start group `group_id` at `version`; return its deadline. Raises ValueError if F or the pace forbids it."""
        if not self.can_admit(version):
            raise ValueError(f"group {group_id} at version {version} would break the bound at batch {self.next_step}")
        return self._add(group_id, version)

    def can_restore(self, version: int) -> bool:
        """Return whether F allows a group that an earlier process started at `version`."""
        return self._fits(self._due, version + self.max_off_policy_steps)

    def restore(self, group_id: int, version: int) -> None:
        """Add a complete group that an earlier process started at `version`.

        With unchanged settings this always keeps F; with other settings check `can_restore` first. Groups in flight
        are not restored: they are admitted again at the current version. Raises ValueError if F forbids it.
        """
        if not self.can_restore(version):
            raise ValueError(
                f"group {group_id} of version {version} does not fit into the batches from {self.next_step} on"
            )
        self._add(group_id, version)
        self.complete(group_id)

    def can_repin(self, group_id: int, version: int) -> bool:
        """Return whether the incomplete group may start again at `version`."""
        due = self._due.copy()
        due[self._entries[group_id].deadline] -= 1
        return self._fits(due, version + self.max_off_policy_steps)

    def repin(self, group_id: int, version: int) -> int:
        """Start the incomplete group again at `version`, not older than before; return its new deadline."""
        entry = self._entries[group_id]
        if entry.complete:
            raise ValueError(f"group {group_id} is complete")
        if not self.can_repin(group_id, version):
            raise ValueError(f"group {group_id} at version {version} would break the bound at batch {self.next_step}")
        self.drop(group_id)
        return self._add(group_id, version)

    def complete(self, group_id: int) -> None:
        """Record that all rollouts of the group are finished and scored."""
        entry = self._entries[group_id]
        if entry.complete:
            raise ValueError(f"group {group_id} is complete already")
        entry.complete = True
        self._complete.setdefault(entry.deadline, set()).add(group_id)

    def drop(self, group_id: int) -> None:
        """Remove a group that will not be trained on, or that was shipped."""
        entry = self._entries.pop(group_id)
        self._due[entry.deadline] -= 1
        if not self._due[entry.deadline]:
            del self._due[entry.deadline]
        if entry.complete:
            self._complete[entry.deadline].remove(group_id)
            if not self._complete[entry.deadline]:
                del self._complete[entry.deadline]

    def ready(self) -> list[int] | None:
        """Choose batch n: B group ids, earliest deadlines first; None if it must wait."""
        chosen, missing = Counter[int](), self.batch_groups
        for deadline in sorted(self._complete):
            chosen[deadline] = min(missing, len(self._complete[deadline]))
            missing -= chosen[deadline]
        if self.finished or missing:
            return None
        rest = self._due - chosen
        if any(total > self._capacity(at, self.next_step + 1) for at, total in _running(rest)):
            return None  # F would fail, which it can only at a deadline
        return sorted(chain.from_iterable(nsmallest(chosen[at], self._complete[at]) for at in chosen))

    def ship(self, group_ids: list[int]) -> None:
        """Record that batch n, as chosen by `ready`, was shipped; n becomes n + 1."""
        for group_id in group_ids:
            self.drop(group_id)
        self.next_step += 1

    def _add(self, group_id: int, version: int) -> int:
        if group_id in self._entries:
            raise ValueError(f"group {group_id} is admitted already")
        deadline = version + self.max_off_policy_steps
        self._entries[group_id] = _Entry(version, deadline)
        self._due[deadline] += 1
        return deadline

    def _fits(self, due: Counter[int], deadline: int, shift: int = 0, extra: int = 0) -> bool:
        """Return whether one more group due at `deadline` fits, if those of `due` are moved `shift` batches earlier."""
        one_more = Counter({at - shift: count for at, count in due.items()})
        one_more[deadline] += 1
        return all(
            total <= self._capacity(at, self.next_step) + extra for at, total in _running(one_more) if at >= deadline
        )

    def _capacity(self, deadline: int, next_step: int) -> float:
        """Return how many groups the batches from `next_step` to `deadline` take."""
        last = UNBOUNDED if self.max_steps is None else self.max_steps - 1
        return (min(deadline, last) - next_step + 1) * self.batch_groups


def _running(due: Counter[int]) -> Iterator[tuple[int, int]]:
    """Yield, for each deadline in order, the number of groups due by then."""
    total = 0
    for deadline in sorted(due):
        total += due[deadline]
        yield deadline, total


_OVERDUE_WINDOWS = 2
"""A position is overdue when this many windows of positions were drawn after it."""

_ENVIRONMENT_WINDOW = 256
"""Number of groups in the running mean of an environment."""

_EXAMPLE_WEIGHT = 0.5
"""Weight of an example's newest group in its history; the policy changes in the epoch between two groups."""

_position = attrgetter("group_id")


class Lookahead:
    """Chooses the next position to start from a pool of up to S = W * B drawn positions.

    B is the number of groups in a batch, W the number of batches in a window. In steady state B groups start in each
    version window, the time between two weight updates. All have the same deadline, so groups that start late in it
    have less time. Therefore each window starts its S positions in the order of descending expected length. With W = 1
    the batches stay random samples of the stream. With larger W the long groups of W batches meet in a few of them, and
    only these wait for a long rollout; successive batches then differ in length.

    The scheduler's `placed` (groups shipped, or admitted and not dropped) identifies the window: places w * S to
    (w + 1) * S - 1 are window w. At the first place of a window the pool is filled up to S draws; the last window of a
    run has only the `places` that are left. With r places of the window left, the r-th shortest position starts, or
    the longest if the pool holds fewer than r. Without drops this is the sorted order. A drop returns a place, so the
    pool becomes empty before the window ends; it is then filled again, the r shortest of the new positions end the
    window, and the longer ones start the next.

    The pool is emptied before it is filled, except at the start of a window, so a position starts before another 2 S
    are drawn. After a restart `placed` may jump, or W may differ; positions that are overdue by 2 S draws then start
    first, and none waits for 4 S, with S of the larger W.

    A position whose environment may not start (`can_start`) stays in the pool in addition to the S. There are at most S
    of them per environment, since nothing is drawn for an environment that may not start.

    Example, S = 4, expected lengths 5 9 1 7 | 2 2 8 3: the order is 9 7 5 1 | 8 3 2 2. If the group of length 7 is
    dropped when one place of the first window is left, two are left: 9 7 5 1, then 2 as the shortest of 2 2 8 3; the
    next window starts with 8.
    """

    def __init__(
        self,
        draw: Callable[[], DrawnExample],
        expected: Callable[[DrawnExample], float | None],
        window: int,
        places: float = float("inf"),
    ) -> None:
        """Start with an empty pool.

        Args:
            draw: draws the next position of the stream.
            expected: returns the expected length of a group, in any unit; None counts as longest.
            window: S, positions that are ordered at once; 0 keeps the order of the stream and draws nothing ahead.
            places: of all batches of the run.
        """
        self._draw = draw
        self._expected = expected
        self._size = window
        self._places = places
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
        if not self._size:
            return self._take(min(pool, key=_position)) if pool else self._draw()
        window = max(self._window, placed // self._size)
        first = window * self._size
        size = int(min(self._size, max(1, self._places - first)))
        if window > self._window or not pool:
            self._window = window
            self._top_up(size - len(pool))
            pool = [draw for draw in self._pool if can_start(draw)]
        oldest = min(pool, key=_position)
        if self._latest - oldest.group_id >= _OVERDUE_WINDOWS * self._size:
            return self._take(oldest)
        left = max(1, size - max(0, placed - first))
        return self._take(pool[max(0, len(pool) - left)])

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


class DurationHistory:
    """Expected seconds of a group: from earlier groups of its example, else the running mean of its environment.

    Seconds, because environments wait too. Simulations with environments that wait lose the gain of ordering if they
    count tokens; where only the engine takes time, seconds with an error of a factor e^0.3 cost 1 % (scheduling.md).
    """

    def __init__(self) -> None:
        self._examples: dict[str, dict[int, _Mean]] = {}
        self._environments: dict[str, _Mean] = {}

    def add(self, env: str, example: int, seconds: float) -> None:
        """Add a finished group, which took `seconds` from its start to its last reward."""
        examples = self._examples.setdefault(env, {})
        examples[example] = examples.get(example, _Mean()).with_one(seconds, _EXAMPLE_WEIGHT)
        mean = self._environments.get(env, _Mean())
        self._environments[env] = mean.with_one(seconds, 1 / _ENVIRONMENT_WINDOW)

    def copy(self) -> "DurationHistory":
        """Return an independent copy in milliseconds, also for a million examples."""
        copied = DurationHistory()
        copied._environments = self._environments.copy()
        copied._examples = {env: examples.copy() for env, examples in self._examples.items()}
        return copied

    def expected(self, env: str, example: int) -> float | None:
        """Return the expected seconds of a group; None if the environment is unknown."""
        known = self._examples.get(env, {}).get(example) or self._environments.get(env)
        return known.value if known else None

    def state(self) -> dict[str, Any]:
        """Return the observed lengths as JSON-serializable values, for `restore`."""
        return {
            env: {
                "mean": [mean.value, mean.count],
                "examples": [[example, m.value, m.count] for example, m in self._examples[env].items()],
            }
            for env, mean in self._environments.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the observed lengths by those that `state` returned."""
        self._environments = {env: _Mean(*saved["mean"]) for env, saved in state.items()}
        self._examples = {
            env: {example: _Mean(value, count) for example, value, count in saved["examples"]}
            for env, saved in state.items()
        }
