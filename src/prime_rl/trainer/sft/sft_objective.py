"""The loss of supervised fine-tuning, on training and validation data, and the division of a batch among the ranks."""

import time
from collections.abc import Sequence

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_rl.configs.sft import SFTConfig
from prime_rl.monitors import Monitor
from prime_rl.trainer.data.packed_stream import PackedRow
from prime_rl.trainer.data.row_assignment import PADDING_ROW, assign_rows
from prime_rl.trainer.losses.auxiliary_losses import cross_entropy
from prime_rl.trainer.micro_batch import MicroBatch, make_micro_batch, masked_row
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.train_step import Counts, Minibatch, Objective, ScoredRow, TrainStep


def share_rows(rows: Sequence[PackedRow], micro_batch_size: int, world: World) -> Minibatch:
    """Put `micro_batch_size` rows into each micro-batch and take this rank's; counts are over all ranks (I9)."""
    groups = [rows[i : i + micro_batch_size] for i in range(0, len(rows), micro_batch_size)]
    mine = assign_rows([float(lengths_of(group).sum()) for group in groups], world.data_size)[world.data_rank]
    learned = sum(int(sequence.loss_mask.sum()) for row in rows for sequence in row)
    return Minibatch(
        rows=[masked_row() if i == PADDING_ROW else to_micro_batch(groups[i]) for i in mine],
        counts=Counts(tokens=max(1, learned)),
    )


def to_micro_batch(rows: Sequence[PackedRow]) -> MicroBatch:
    """Concatenate rows to one micro-batch; attention keeps their segments apart."""
    sequences = [sequence for row in rows for sequence in row]
    return make_micro_batch(
        np.concatenate([s.tokens for s in sequences]),
        np.concatenate([s.loss_mask for s in sequences]),
        [len(s) for s in sequences],
    )


def sft_objective(scored: ScoredRow) -> Objective:
    """Compute the mean cross-entropy over the trained tokens of all ranks, and their entropy."""
    mask = scored.row.loss_mask
    loss = cross_entropy(scored.logprobs, mask).sum() / scored.counts.tokens
    return Objective(loss, {"entropy": (scored.entropy.sum(), mask.sum())})


def lengths_of(rows: Sequence[PackedRow]) -> NDArray[np.int64]:
    """Return the number of tokens of each sequence, int64 [S]."""
    return np.array([len(sequence) for row in rows for sequence in row], np.int64)


class Validator:
    """Reports `val/loss` by version of the weights: the mean over all trained tokens of the validation set."""

    def __init__(
        self, config: SFTConfig, rows: list[PackedRow] | None, step: TrainStep, world: World, monitor: Monitor | None
    ) -> None:
        """Divide the packed rows among the ranks; None disables validation. `monitor` is None except on rank 0."""
        self._minibatch = None if rows is None else share_rows(rows, config.data.micro_batch_size, world)
        self._interval = config.val.interval if config.val is not None else 1
        self._train_step, self._monitor = step, monitor

    def __call__(self, version: int, last: bool = False) -> None:
        """Validate version 0, each `val.interval`-th version, and the `last`. All ranks call it together."""
        if self._minibatch is None or (version % self._interval and not last):
            return
        start = time.perf_counter()
        loss = self._train_step.evaluate(self._minibatch, sft_objective)
        if self._monitor is not None:
            self._monitor.log(version, {"val/loss": loss, "time/val": time.perf_counter() - start})
            logger.info(f"validation of version {version} | loss {loss:.4g}")
