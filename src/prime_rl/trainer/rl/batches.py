"""From the batch of a step to this rank's micro-batches: each row once, on exactly one rank (I9)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_rl.configs.trainer import FakeDataConfig
from prime_rl.run.assign import PADDING_ROW, assign_rows
from prime_rl.run.batch import STREAMS, Batch
from prime_rl.trainer.engine import Counts, Minibatch
from prime_rl.trainer.micro_batch import MicroBatch, make_micro_batch, masked_row
from prime_rl.trainer.parallel import World


def split_batch(batch: Batch, step: int, minibatches: int, world: World, room: int) -> list[Minibatch]:
    """Cut a batch into minibatches and take this rank's rows of each.

    Which rows make a minibatch does not depend on the world size; only who computes them does. A batch with fewer
    rows than `minibatches` gives one minibatch per row.

    Args:
        batch: the whole batch, read by every rank.
        step: n, the version that is being trained.
        minibatches: optimizer steps.
        world: the ranks to share the rows.
        room: most tokens in one micro-batch; rows that fit are laid one after the other, which changes nothing but
            the number of forward passes.
    """
    parts = [[row for row in part if row != PADDING_ROW] for part in assign_rows(batch.row_cost, minibatches)]
    return [_minibatch(batch, step, part, world, room) for part in parts if part]


def fake_batch(config: FakeDataConfig, vocabulary: int, row_length: int, seed: int, step: int) -> Batch:
    """Draw a random batch: `batch_size` rollouts whose second half was sampled by version `step`.

    Args:
        config: how many rollouts of which length, and how many to a row.
        vocabulary: tokens are drawn below it.
        row_length: longest row, tokens.
        seed: with `step` it determines the batch.
        step: n.
    """
    random = np.random.default_rng([seed, step])
    size, longest = config.batch_size, min(config.seq_len, row_length)
    lengths = random.integers(2, longest + 1, size) if config.generate_samples else np.full(size, longest)
    lengths = np.sort(lengths)[::-1]  # rows by descending cost, as the orchestrator packs them
    per_row = max(1, min(config.micro_batch_size, row_length // longest))
    rows = [lengths[i : i + per_row] for i in range(0, size, per_row)]
    total = int(lengths.sum())
    index = np.concatenate([np.arange(n) for n in lengths])
    mask = index >= np.repeat(np.maximum(1, lengths // 2), lengths)
    return Batch(
        tokens=random.integers(0, vocabulary, total, dtype=np.int32),
        loss_mask=mask.astype(np.uint8),
        logprobs=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
        advantages=np.repeat(random.standard_normal(size), lengths).astype(np.float32),
        versions=np.where(mask, step, -1).astype(np.int32),
        temperature=np.ones(total, np.float32),
        segment_ids=np.concatenate([np.repeat(np.arange(len(row)), row) for row in rows]).astype(np.int32),
        row_offsets=np.concatenate([[0], np.cumsum([row.sum() for row in rows])]).astype(np.int64),
        row_cost=np.array([row.sum() for row in rows], np.float32),
        seq_lens=lengths.astype(np.int32),
        sample_group=np.arange(size, dtype=np.int64),
        sample_rollout=np.zeros(size, np.int32),
    )


def _minibatch(batch: Batch, step: int, rows: Sequence[int], world: World, room: int) -> Minibatch:
    dealt = assign_rows(batch.row_cost[list(rows)], world.data_size)
    shares = [[rows[i] for i in share if i != PADDING_ROW] for share in dealt]
    mine = shares[world.data_rank]
    parts = [mine[part] for part in _lay_together(batch, shares, room)]
    streams = {name: array.dtype for name, array in batch.arrays.items() if name in STREAMS}
    return Minibatch(
        rows=[_micro_batch(batch, part, step) if part else masked_row(streams) for part in parts],
        counts=_count(batch, rows),
    )


def _count(batch: Batch, rows: Sequence[int]) -> Counts:
    """Count what is trained in `rows`, for the whole world; each count is at least 1, as something is divided by it."""

    def gather(array: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([array[batch.row(row)] for row in rows])

    trained = gather(batch.loss_mask) != 0

    def weighed(weights: NDArray[np.float32] | None, otherwise: int) -> int:
        return max(1, otherwise if weights is None else int(np.sum(trained & (gather(weights) != 0))))

    return Counts(
        tokens=weighed(batch.rl_weights, int(trained.sum())),
        sequences=sum(len(np.unique(batch.segment_ids[batch.row(row)])) for row in rows),
        ce_tokens=weighed(batch.ce_weights, 0),
        ref_kl_tokens=weighed(batch.ref_kl_weights, 0),
    )


def _lay_together(batch: Batch, shares: Sequence[Sequence[int]], room: int) -> list[slice]:
    """Cut the ranks' rows into micro-batches of at most `room` tokens, at the same places on every rank.

    The i-th rows of all ranks cost about the same, and so do micro-batches of the same places: no rank waits long.

    Args:
        batch: has the rows.
        shares: the rows of each rank, in order; a rank may have fewer than another.
        room: most tokens in one micro-batch; a longer row is one of its own.
    """
    lengths = np.zeros((len(shares), max(map(len, shares))), np.int64)
    for rank, share in enumerate(shares):
        lengths[rank, : len(share)] = np.diff(batch.row_offsets)[list(share)]
    starts: list[int] = []
    left = np.full(len(shares), -1)
    for place, needed in enumerate(lengths.T):
        if (needed > left).any():
            starts.append(place)
            left = np.full(len(shares), room)
        left = left - needed
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], lengths.shape[1]], strict=True)]


def _micro_batch(batch: Batch, rows: Sequence[int], step: int) -> MicroBatch:
    def gather(array: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([array[batch.row(row)] for row in rows])

    lengths = np.concatenate([np.bincount(batch.segment_ids[batch.row(row)]) for row in rows])
    sampled = gather(batch.loss_mask) != 0
    starts = np.cumsum(lengths) - lengths
    older = np.add.reduceat(sampled & (gather(batch.versions) != step), starts, dtype=np.int64)
    return make_micro_batch(
        gather(batch.tokens),
        sampled,
        lengths,
        logprobs=gather(batch.logprobs),
        advantages=gather(batch.advantages),
        temperature=gather(batch.temperature),
        on_policy=np.repeat(older == 0, lengths),
        streams={name: gather(array) for name, array in batch.arrays.items() if name in STREAMS},
    )
