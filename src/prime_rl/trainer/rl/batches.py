"""From the batch of a step to this rank's micro-batches: each row once, on exactly one rank (I9)."""

from collections.abc import Sequence

import numpy as np

from prime_rl.configs.trainer import FakeDataConfig
from prime_rl.run.batch import PADDING_ROW, Batch, assign_rows
from prime_rl.trainer.engine import Minibatch
from prime_rl.trainer.micro_batch import MicroBatch, make_micro_batch, masked_row
from prime_rl.trainer.parallel import World


def split_batch(batch: Batch, step: int, minibatches: int, world: World) -> list[Minibatch]:
    """Cut a batch into minibatches and take this rank's rows of each.

    Which rows make a minibatch does not depend on the world size; only who computes them does. A batch with fewer
    rows than `minibatches` gives one minibatch per row.

    Args:
        batch: the whole batch, read by every rank.
        step: n, the version that is being trained.
        minibatches: optimizer steps.
        world: the ranks to share the rows.
    """
    parts = [[row for row in part if row != PADDING_ROW] for part in assign_rows(batch.row_cost, minibatches)]
    return [_minibatch(batch, step, part, world) for part in parts if part]


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


def _minibatch(batch: Batch, step: int, rows: Sequence[int], world: World) -> Minibatch:
    mine = assign_rows(batch.row_cost[list(rows)], world.size)[world.rank]
    tokens = sum(int(batch.loss_mask[batch.row(row)].sum()) for row in rows)
    return Minibatch(
        rows=[masked_row() if i == PADDING_ROW else _micro_batch(batch, rows[i], step) for i in mine],
        normaliser=max(1, tokens),
    )


def _micro_batch(batch: Batch, index: int, step: int) -> MicroBatch:
    row = batch.row(index)
    segments, sampled = batch.segment_ids[row], batch.loss_mask[row] != 0
    others = np.unique(segments[sampled & (batch.versions[row] != step)])
    return make_micro_batch(
        batch.tokens[row],
        sampled,
        segments,
        logprobs=batch.logprobs[row],
        advantages=batch.advantages[row],
        temperature=batch.temperature[row],
        on_policy=~np.isin(segments, others),
    )
