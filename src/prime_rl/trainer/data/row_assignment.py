"""Assigns the rows of a batch to ranks. All ranks compute the same assignment without communication."""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PADDING_ROW = -1
"""Row index of a fully masked row that `assign_rows` adds to give all ranks the same count."""


def assign_rows(costs: Sequence[float] | NDArray[np.floating[Any]], world: int) -> list[list[int]]:
    """Assign each row to one rank, with equal counts and balanced cost.

    Ranks that shard a model wait for each other in every forward pass, so the i-th rows of all ranks should have
    similar costs, in addition to the sums. This is the balanced differencing method (Michiels, Korst, Aarts and van
    Leeuwen 2003, "Performance ratios for the differencing method applied to the balanced number partitioning problem"):
    sorted by cost, every `world` rows form a round with one row per rank. Then the two rounds with the largest spread
    are merged, the largest of one with the smallest of the other, until one is left.

    The largest sum is at most 2 - 1 / world times the optimum with equal counts, and exceeds the smallest sum by at
    most the largest spread of a round.

    `costs` [R] are not negative. Returns ascending row indices by rank; shorter lists are padded with `PADDING_ROW`. If
    the rows are sorted by descending cost, the i-th rows of all ranks belong to one round.
    """
    order = sorted(range(len(costs)), key=lambda row: (-float(costs[row]), row))
    rounds = []
    for start in range(0, len(order), world):
        shares = [(float(costs[row]), [row]) for row in order[start : start + world]]
        shares += [(0.0, [])] * (world - len(shares))
        rounds.append((shares[-1][0] - shares[0][0], start, shares))  # minus the spread, since a heap pops the smallest
    heapq.heapify(rounds)
    while len(rounds) > 1:
        _, start, one = heapq.heappop(rounds)
        _, _, other = heapq.heappop(rounds)
        sums = [(a + b, rows + more) for (a, rows), (b, more) in zip(one, reversed(other), strict=True)]
        shares = sorted(sums, key=lambda share: (-share[0], share[1]))
        heapq.heappush(rounds, (shares[-1][0] - shares[0][0], start, shares))
    assigned = [rows for _, rows in rounds[0][2]] if rounds else [[] for _ in range(world)]
    count = -(-len(costs) // world)
    return [sorted(rows) + [PADDING_ROW] * (count - len(rows)) for rows in assigned]
