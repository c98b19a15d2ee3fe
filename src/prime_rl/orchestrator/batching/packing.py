"""Packs the samples of a batch into rows of at most `seq_len` tokens and similar cost, without padding."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_rl.core.types import Group, Sample
from prime_rl.orchestrator.batching.row_flops import TOKENS, RowCost
from prime_rl.storage.batch import Batch

_FEWEST_ROWS = 16
_ROW_MULTIPLE = 8
_ROUNDING = 1 / 16
"""Share of additional rows that is allowed to make their number divisible by a higher power of two."""


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items, the longest first, each into the fullest row of `capacity` tokens that fits: O(n log n).

    At most 11/9 of the optimum + 6/9 rows (Johnson 1973; Dosa 2007), in practice the optimum.

    Returns the indices of the items of each row. Raises ValueError if an item is larger than a row.
    """
    if lengths and max(lengths) > capacity:
        raise ValueError(f"a sample of {max(lengths)} tokens does not fit into a row of {capacity}")
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(free, (lengths[item], -1))
        if place < len(free):
            free_tokens, row = free.pop(place)
        else:
            free_tokens, row = capacity, len(rows)
            rows.append([])
        rows[row].append(item)
        insort(free, (free_tokens - lengths[item], row))
    return rows


def even_rows(lengths: Sequence[int], costs: Sequence[float], capacity: int) -> list[list[int]]:
    """Pack items into rows of similar cost, slightly more than the minimum, for any common number of ranks.

    The number of ranks is unknown here. With twelve full rows, four of eight ranks would be idle half of the time; with
    sixteen rows of equal cost none is, and the trainer concatenates rows that fit together. So the number of rows is
    rounded up to a multiple of eight, at least sixteen, and to a multiple of a higher power of two if that is near.

    Returns the indices of the items of each row, by descending cost. With fewer items than rows, each has its own row.
    """
    fewest = best_fit_decreasing(lengths, capacity)
    count = _round_number(len(fewest))
    rows = None
    while rows is None and count < len(lengths):
        rows = _cheapest_fit(lengths, costs, capacity, count)
        if rows is None and count == len(fewest):
            rows = fewest  # the number is round already, and the rows are too full to be balanced
        count = _round_number(count + 1)
    if rows is None:
        rows = [[item] for item in range(len(lengths))]
    return sorted(rows, key=lambda row: (-sum(costs[item] for item in row), row))


def pack(
    groups: Sequence[Group],
    advantages: Sequence[NDArray[np.float64]],
    seq_len: int,
    cost: RowCost = TOKENS,
    mask_truncated: bool = False,
) -> Batch:
    """Build the batch of finished groups; its rows have at most `seq_len` tokens and are sorted by descending cost.

    Args:
        groups: finished groups.
        advantages: for each group float64 [P], of the parts of its rollouts (`part_advantages`). Each sampled token
            gets that of its part.
        seq_len: longest row in tokens; ValueError if a sample is longer.
        cost: of a sample for the trainer.
        mask_truncated: mask all tokens of rollouts, or of agents, with a completion that was cut by its token limit.
    """
    items = [
        (sample, group, index, values[start:])
        for group, values in zip(groups, advantages, strict=True)
        for index, (rollout, start) in enumerate(zip(group.rollouts, group.part_offsets, strict=False))
        for sample in rollout.samples
    ]
    masks = [
        np.zeros(len(sample), np.uint8)
        if mask_truncated and group.rollouts[index].is_sample_truncated(sample)
        else _loss_mask(sample)
        for sample, group, index, _ in items
    ]
    lengths = [len(sample) for sample, *_ in items]
    costs = cost(np.array(lengths, np.int64), np.array([mask.sum() for mask in masks], np.int64))
    rows = even_rows(lengths, costs.tolist(), seq_len)
    order = [item for row in rows for item in row]
    ordered = [items[item] for item in order]
    samples = [sample for sample, *_ in ordered]
    seq_lens = np.array([lengths[item] for item in order], np.int32)
    mask = np.concatenate([masks[item] for item in order])
    per_token = np.concatenate([_per_token(sample, values) for sample, *_, values in ordered])
    temperatures = np.array([group.temperature for _, group, *_ in ordered], np.float32)
    return Batch(
        tokens=np.concatenate([sample.tokens for sample in samples]),
        loss_mask=mask,
        logprobs=np.concatenate([sample.logprobs for sample in samples]),
        advantages=np.where(mask == 1, per_token, 0).astype(np.float32),
        versions=np.concatenate([sample.versions for sample in samples]),
        temperature=np.repeat(temperatures, seq_lens),
        segment_ids=np.repeat(np.concatenate([np.arange(len(row)) for row in rows]), seq_lens).astype(np.int32),
        row_offsets=np.cumsum([0, *(sum(lengths[item] for item in row) for row in rows)]).astype(np.int64),
        row_cost=np.array([costs[row].sum() for row in rows], np.float32),
        seq_lens=seq_lens,
        sample_group=np.array([group.group_id for _, group, *_ in ordered], np.int64),
        sample_rollout=np.array([index for _, _, index, _ in ordered], np.int32),
        **_truncation([group for _, group, *_ in ordered], seq_lens),
    )


def _truncation(groups: Sequence[Group], seq_lens: NDArray[np.int32]) -> dict[str, Any]:
    """Return the sampler's truncation per token; parameters that truncated nothing are omitted."""
    cuts = {
        "top_k": np.array([group.top_k for group in groups], np.int32),
        "top_p": np.array([group.top_p for group in groups], np.float32),
        "min_p": np.array([group.min_p for group in groups], np.float32),
    }
    neutral = {"top_k": 0, "top_p": 1, "min_p": 0}
    return {name: np.repeat(cut, seq_lens) for name, cut in cuts.items() if (cut != neutral[name]).any()}


def _per_token(sample: Sample, advantages: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the advantage of each token, given those of the rollout's parts."""
    if sample.credits is None:
        return np.full(len(sample), advantages[0], np.float32)
    return advantages[sample.credits].astype(np.float32)


def _loss_mask(sample: Sample) -> NDArray[np.uint8]:
    """Return the mask without the first token, which has no context."""
    mask = sample.loss_mask.astype(np.uint8)
    mask[0] = 0
    return mask


def _round_number(count: int) -> int:
    multiple, count = _ROW_MULTIPLE, max(_FEWEST_ROWS, count)
    while _round_up(count, 2 * multiple) <= count * (1 + _ROUNDING):
        multiple *= 2
    return _round_up(count, multiple)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _cheapest_fit(lengths: Sequence[int], costs: Sequence[float], capacity: int, count: int) -> list[list[int]] | None:
    """Put items, the costliest first, each into the cheapest of `count` rows that fits; None if none fits."""
    rows: list[list[int]] = [[] for _ in range(count)]
    free, sums = np.full(count, capacity), np.zeros(count)
    for item in sorted(range(len(lengths)), key=lambda i: (-costs[i], i)):
        row = int(np.where(free >= lengths[item], sums, np.inf).argmin())
        if free[row] < lengths[item]:
            return None
        rows[row].append(item)
        free[row] -= lengths[item]
        sums[row] += costs[item]
    return rows
