"""Row assignment: every row once, equal counts, bounded imbalance."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.trainer.data.row_assignment import PADDING_ROW, assign_rows

cost = st.one_of(st.floats(0, 1e6), st.sampled_from([0.0, 1.0, 1e15]))


def real(rows):
    return [row for row in rows if row != PADDING_ROW]


def sums(dealt, costs):
    return [sum(costs[row] for row in real(rows)) for rows in dealt]


def longest_first(costs, world):
    """Longest processing time first with equal counts, in plain loops."""
    count = -(-len(costs) // world)
    dealt, loads = [[] for _ in range(world)], [0.0] * world
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        rank = min((r for r in range(world) if len(dealt[r]) < count), key=lambda r: (loads[r], r))
        dealt[rank].append(row)
        loads[rank] += costs[row]
    return dealt


@settings(deadline=None)
@given(st.lists(cost, max_size=40), st.integers(1, 9))
def test_assign_rows_gives_every_row_once_with_equal_counts(costs, world):
    dealt = assign_rows(costs, world)
    assert [len(rows) for rows in dealt] == [-(-len(costs) // world)] * world
    assert sorted(row for rows in dealt for row in real(rows)) == list(range(len(costs)))
    assert all(rows == sorted(real(rows)) + [PADDING_ROW] * rows.count(PADDING_ROW) for rows in dealt)
    assert assign_rows(np.array(costs), world) == dealt


@settings(deadline=None)
@given(st.lists(cost, min_size=1, max_size=40), st.integers(1, 9))
def test_assign_rows_spread_is_at_most_that_of_a_round(costs, world):
    ordered = sorted(costs, reverse=True) + [0.0] * (-len(costs) % world)
    spread = max(ordered[i] - ordered[i + world - 1] for i in range(0, len(ordered), world))
    loads = sums(assign_rows(costs, world), costs)
    assert max(loads) - min(loads) <= spread + 1e-12 * max(loads)


@settings(deadline=None)
@given(st.lists(cost, min_size=1, max_size=40), st.integers(1, 9))
def test_assign_rows_of_sorted_rows_keeps_rounds(costs, world):
    """So no rank waits longer in a forward pass than it must: the sum of the costliest of each place is the least."""
    costs = sorted(costs, reverse=True)
    dealt = assign_rows(costs, world)
    for place in range(len(dealt[0])):
        rows = {rows[place] for rows in dealt} - {PADDING_ROW}
        assert rows == set(range(place * world, min((place + 1) * world, len(costs))))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.integers(2, 3))
def test_assign_rows_largest_sum_is_within_proven_ratio(costs, world):
    count = -(-len(costs) // world)
    best = min(
        max(sum(c for c, rank in zip(costs, ranks, strict=True) if rank == r) for r in range(world))
        for ranks in itertools.product(range(world), repeat=len(costs))
        if max(ranks.count(r) for r in range(world)) <= count
    )
    assert max(sums(assign_rows(costs, world), costs)) <= (2 - 1 / world) * best + 1e-9


def test_assign_rows_balances_better_than_longest_first():
    """Costs as packing makes them: within a factor of two, the number a multiple of the world's."""
    random = np.random.default_rng(0)
    ours, theirs = [], []
    for world, rows in itertools.product((2, 4, 8), (16, 32, 64)):
        for _ in range(20):
            costs = random.uniform(1, 2, rows)
            mean = costs.sum() / world
            ours.append(max(sums(assign_rows(costs, world), costs)) / mean)
            theirs.append(max(sums(longest_first(costs, world), costs)) / mean)
    assert np.mean(ours) < 1.01
    assert np.mean(ours) < np.mean(theirs)


def test_assign_rows_of_no_or_one_row():
    assert assign_rows([], 3) == [[], [], []]
    assert assign_rows([2.0], 3) == [[0], [PADDING_ROW], [PADDING_ROW]]
    assert assign_rows([8, 7, 6, 5, 4, 3], 2) == [[1, 2, 4], [0, 3, 5]]
