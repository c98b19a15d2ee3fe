"""I9 world size is invisible: rows of a batch to micro-batches of this rank, and the loss over those of all ranks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prime_rl.run.assign import PADDING_ROW, assign_rows
from prime_rl.trainer.engine import Counts, Minibatch, Objective, Scored
from prime_rl.trainer.losses import cross_entropy
from prime_rl.trainer.micro_batch import MicroBatch, make_micro_batch, masked_row
from prime_rl.trainer.parallel import World
from prime_rl.trainer.sft.stream import Row


def share_rows(rows: Sequence[Row], micro_batch_size: int, world: World) -> Minibatch:
    """Lay `micro_batch_size` rows into each micro-batch and take this rank's; N counts the tokens of all ranks."""
    groups = [rows[i : i + micro_batch_size] for i in range(0, len(rows), micro_batch_size)]
    mine = assign_rows([float(lengths_of(group).sum()) for group in groups], world.data_size)[world.data_rank]
    learned = sum(int(sequence.loss_mask.sum()) for row in rows for sequence in row)
    return Minibatch(
        rows=[masked_row() if i == PADDING_ROW else to_micro_batch(groups[i]) for i in mine],
        counts=Counts(tokens=max(1, learned)),
    )


def to_micro_batch(rows: Sequence[Row]) -> MicroBatch:
    """Lay rows one after the other: attention keeps their segments apart, so several rows are one micro-batch."""
    sequences = [sequence for row in rows for sequence in row]
    return make_micro_batch(
        np.concatenate([s.tokens for s in sequences]),
        np.concatenate([s.loss_mask for s in sequences]),
        [len(s) for s in sequences],
    )


def sft_objective(scored: Scored) -> Objective:
    """Cross-entropy over the learned tokens, a mean over those of all ranks, and their entropy."""
    mask = scored.row.loss_mask
    loss = cross_entropy(scored.logprobs, mask).sum() / scored.counts.tokens
    return Objective(loss, {"entropy": (scored.entropy.sum(), mask.sum())})


def lengths_of(rows: Sequence[Row]) -> NDArray[np.int64]:
    """Tokens of each sequence, int64 [S]."""
    return np.array([len(sequence) for row in rows for sequence in row], np.int64)
