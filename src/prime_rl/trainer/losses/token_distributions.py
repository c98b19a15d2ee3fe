"""Samples of the per-token values of a step, from which the monitors draw histograms (`log_extras`)."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prime_rl.trainer.losses.loss_inputs import clamped_difference, finite
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.train_step import Minibatch, Objective, ScoredRow

MAX_TOKENS = 16384
"""Tokens in one sample, over all ranks: what they exchange has the same size for every batch and number of ranks."""

TokenValues = Callable[[ScoredRow], Mapping[str, Tensor]]
"""Returns values [T] by name for a row; the names are the same for every row."""


class TokenDistributions:
    """Takes a sample of the trained tokens of a step: evenly spaced tokens of each row.

    Args:
        values: the values to sample; they are computed only in steps that `is_due`.
        is_due: whether the values of a step are logged; equal on all ranks.
    """

    def __init__(self, values: TokenValues, world: World, is_due: Callable[[int], bool]) -> None:
        self._values, self._world, self._is_due = values, world, is_due
        self._rows: list[Tensor] = []
        self._names: list[str] = []

    def record(
        self, step: int, minibatches: Sequence[Minibatch], objective: Callable[[ScoredRow], Objective]
    ) -> Callable[[ScoredRow], Objective]:
        """Return `objective`; in steps that are due, it also samples the tokens of each row of `minibatches`."""
        self._rows.clear()
        if not self._is_due(step):
            return objective
        limit = max(1, self._size // max(1, sum(len(minibatch.rows) for minibatch in minibatches)))

        def recording(scored: ScoredRow) -> Objective:
            self._add(scored, limit)
            return objective(scored)

        return recording

    def gather(self) -> dict[str, NDArray[np.float64]]:
        """Return the sample of all ranks by name, and forget it; {} in steps that are not due.

        All ranks call it together. Ranks that work on the same rows count once.
        """
        if not self._rows:
            return {}
        world = self._world
        mine = torch.cat(self._rows, dim=1)[:, : self._size].double()
        self._rows.clear()
        everything = torch.zeros(world.data_size, len(self._names), self._size, dtype=torch.float64)
        used = torch.zeros(world.data_size, dtype=torch.int64)
        if world.rank % world.model_parallel_size == 0:
            everything[world.data_rank, :, : mine.shape[1]] = mine.cpu()
            used[world.data_rank] = mine.shape[1]
        everything = world.sum(everything.to(world.device)).cpu()
        counts = world.sum(used.to(world.device)).tolist()
        parts = [everything[rank, :, :count] for rank, count in enumerate(counts)]
        return dict(zip(self._names, torch.cat(parts, dim=1).numpy(), strict=True))

    @property
    def _size(self) -> int:
        """The largest number of tokens from this rank."""
        return max(1, MAX_TOKENS // self._world.data_size)

    @torch.no_grad()
    def _add(self, scored: ScoredRow, limit: int) -> None:
        values = self._values(scored)
        trained = scored.row.loss_mask.nonzero().squeeze(1)
        if len(trained) > limit:
            trained = trained[torch.linspace(0, len(trained) - 1, limit, device=trained.device).long()]
        self._names = list(values)
        self._rows.append(torch.stack([value.detach().float()[trained] for value in values.values()]))


def rl_token_values(scored: ScoredRow) -> dict[str, Tensor]:
    """Return the values of reinforcement learning; the mismatch is NaN after the first update of the step."""
    row = scored.row
    log_ratio = clamped_difference(scored.logprobs, row.sampler_logprobs, row.loss_mask).double()
    mismatch = torch.expm1(log_ratio) - log_ratio
    return {
        **sft_token_values(scored),
        "importance_ratio": log_ratio.exp(),
        "mismatch_kl": mismatch if scored.before_first_update else torch.full_like(mismatch, torch.nan),
        "advantage": row.advantages,
    }


def sft_token_values(scored: ScoredRow) -> dict[str, Tensor]:
    """Return the log-probability and the entropy of each token."""
    return {"logprob": finite(scored.logprobs), "entropy": scored.entropy}
