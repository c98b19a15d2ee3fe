"""Order of admission: longest first within each window; every position starts exactly once, without long waits."""

import json
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.scheduler import UNBOUNDED, DeadlineScheduler, DurationHistory, Lookahead


@dataclass(frozen=True)
class Position:
    group_id: int


def pool_of(ahead):
    """Positions that were drawn and not started, ascending."""
    return sorted(ahead._pool, key=lambda position: position.group_id)


def lookahead(lengths, window, start=0, places=UNBOUNDED) -> Lookahead:
    """A lookahead over positions from `start`; `lengths` is a function or list of expected lengths."""
    expected = lengths if callable(lengths) else lengths.__getitem__
    positions = map(Position, count(start))
    return Lookahead(lambda: next(positions), lambda p: expected(p.group_id), window, places)


def given_ids(ahead, places) -> list[int]:
    return [ahead.next(placed).group_id for placed in places]


@pytest.mark.parametrize(
    ("lengths", "limit", "places", "order"),
    [
        ([5, 9, 1, 7, 2, 2, 8, 3, 0, 0, 0, 0], UNBOUNDED, range(8), [9, 7, 5, 1, 8, 3, 2, 2]),
        # The group of length 7 was dropped after three.
        ([5, 9, 1, 7, 2, 2, 8, 3, 0, 0, 0, 0], UNBOUNDED, [0, 1, 2, 2, 3, 4], [9, 7, 5, 1, 2, 8]),
        # A drop from an earlier window does not end the current one.
        ([0, 0, 0, 0, 4, 5, 6, 7], UNBOUNDED, [0, 1, 2, 3, 4, 3], [0, 0, 0, 0, 7, 6]),
        # Unknown lengths count as longest.
        ([5, None, 9, None], UNBOUNDED, range(4), [None, None, 9, 5]),
        # With W = 2, B = 2 and three batches, batch 2 is a random sample and not the longer half of a window.
        ([5, 9, 1, 7, 2, 3, 8, 9], 6, range(6), [9, 7, 5, 1, 3, 2]),
    ],
)
def test_lookahead_of_four_starts_the_longest_first(lengths, limit, places, order):
    ahead = lookahead(lengths, 4, places=limit)
    assert [lengths[group] for group in given_ids(ahead, places)] == order


def test_lookahead_overdue_positions_start_first():
    """Each call finds only the last place of a window: without a limit the shortest would always start."""
    ids = given_ids(lookahead(lambda i: 9 if i < 3 else 1, 4), range(3, 80, 4))
    assert {0, 1, 2} < set(ids[:12])


@pytest.mark.parametrize("places", [range(12), [0, 0, 7, 3, 3, 12, 9]])
def test_lookahead_not_length_aware_keeps_the_stream_order(places):
    ahead = lookahead(lambda i: i, 0)
    assert given_ids(ahead, places) == list(range(len(places)))
    assert pool_of(ahead) == []


def test_lookahead_restored_positions_are_started():
    before = lookahead(lambda i: i % 5, 4)
    early = given_ids(before, range(6))
    waiting = pool_of(before)
    after = lookahead(lambda i: i % 5, 4, start=8)
    after.restore(waiting)
    assert sorted(early + given_ids(after, range(6, 16))) == list(range(16))
    switched_off = lookahead(lambda i: i, 0, start=8)
    switched_off.restore(waiting)
    assert given_ids(switched_off, range(6, 10)) == [p.group_id for p in waiting] + [8, 9]


@settings(max_examples=25)
@given(
    batch_groups=st.integers(1, 5),
    async_level=st.integers(1, 3),
    batches=st.sampled_from([1, 2, 3, 8]),
    share_of_drops=st.integers(0, 8),
    lengths=st.lists(st.integers(0, 9), min_size=50, max_size=50),
    data=st.data(),
)
def test_lookahead_with_scheduler_no_position_waits_two_windows(
    batch_groups, async_level, batches, share_of_drops, lengths, data
):
    """With the scheduler's `placed`, random completions, drops and weight updates."""
    scheduler = DeadlineScheduler(batch_groups, async_level)
    window = batches * batch_groups
    ahead = lookahead(lambda i: lengths[i % 50], window)
    drawn, version, running = 0, 0, []
    for _ in range(40):
        while scheduler.can_admit(version):
            group = ahead.next(scheduler.placed).group_id
            scheduler.admit(group, version)
            running.append(group)
            drawn = max([drawn, group + 1, *(p.group_id + 1 for p in pool_of(ahead))])
            assert len(pool_of(ahead)) <= window
            assert drawn - group <= 2 * window
            assert all(drawn - p.group_id <= 2 * window for p in pool_of(ahead))
        if version < scheduler.next_step and (not running or data.draw(st.booleans())):
            version += 1
            continue
        group = running.pop(data.draw(st.integers(0, len(running) - 1)))
        if data.draw(st.integers(0, 9)) < share_of_drops:
            scheduler.drop(group)
        else:
            scheduler.complete(group)
        while (batch := scheduler.ready()) is not None:
            scheduler.ship(batch)


@settings(max_examples=25)
@given(
    batch_groups=st.integers(1, 4),
    sizes=st.lists(st.sampled_from([0, 1, 2, 4, 8]), min_size=2, max_size=5),
    lengths=st.lists(st.integers(0, 9), min_size=50, max_size=50),
    data=st.data(),
)
def test_lookahead_restarts_with_other_windows_start_each_position_once(batch_groups, sizes, lengths, data):
    """A restart moves `placed` back by what was in flight, which starts again; the pool and other W come from it."""
    started: list[int] = []
    waiting, placed, cursor = [], 0, 0
    for batches in sizes:
        ahead = lookahead(lambda i: lengths[i % 50], batches * batch_groups, start=cursor)
        ahead.restore(waiting)
        for _ in range(data.draw(st.integers(1, 60))):
            started.append(ahead.next(placed).group_id)
            placed += 1
            cursor = max([cursor, started[-1] + 1, *(p.group_id + 1 for p in pool_of(ahead))])
            assert all(cursor - p.group_id <= 4 * max(*sizes, 1) * batch_groups for p in pool_of(ahead))
        waiting = pool_of(ahead)
        placed = max(0, placed - data.draw(st.integers(0, 5)))
    assert sorted(started + [p.group_id for p in waiting]) == list(range(cursor))


def test_duration_history_expects_from_example_else_environment():
    history = DurationHistory()
    assert history.expected("math", 0) is None
    history.add("math", 0, 100)
    history.add("math", 1, 300)
    assert history.expected("math", 0) == 100
    assert history.expected("math", 7) == 200
    assert history.expected("code", 0) is None, "another environment, another length"
    history.add("math", 0, 200)
    assert history.expected("math", 0) == 150
    history.add("math", 0, 350)
    assert history.expected("math", 0) == 250, "the newest counts half: the policy changes"
    restored = DurationHistory()
    restored.restore(json.loads(json.dumps(history.state())))
    for known in (history, restored):
        known.add("math", 1, 40.0)
    assert [restored.expected("math", i) for i in range(3)] == [history.expected("math", i) for i in range(3)]


@pytest.mark.parametrize("window", [4, 0])
def test_lookahead_blocked_positions_start_when_they_can(window):
    drawn = []

    def draw():
        drawn.append(Position(2 * len(drawn) + 1 if paused else len(drawn)))
        return drawn[-1]

    paused = False
    ahead = Lookahead(draw, lambda position: 1.0, window)
    given_first = ahead.next(0)
    waiting = pool_of(ahead)
    paused = True
    odd = [ahead.next(placed, lambda position: position.group_id % 2 == 1) for placed in range(1, 12)]
    assert all(position.group_id % 2 for position in odd)
    assert len(pool_of(ahead)) <= 8
    paused = False
    rest = [ahead.next(placed) for placed in range(12, 12 + len(pool_of(ahead)))]
    assert set(waiting) <= {given_first, *odd, *rest}
    assert len({given_first, *odd, *rest}) == 12 + len(rest), "each once"
