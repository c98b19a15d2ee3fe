"""Context parallelism: several ranks share one packed row; loss and gradients do not change (I9).

Each rank holds a contiguous slice of the row's tokens. An all-to-all around the attention of every layer converts
slices of tokens with all heads into all tokens with some of the heads, and back (DeepSpeed-Ulysses, Jacobs et al. 2023,
arXiv:2309.14509). Each rank scores the tokens that its slice predicts; the sum over the ranks is the whole row. Every
rank then computes the same loss and keeps the gradient of its own slice.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.micro_batch import MicroBatch
from prime_rl.trainer.parallel.collectives import all_to_all, sum_forward


@dataclass(frozen=True, slots=True)
class RowSlice:
    """One rank's part of a row, which is padded to a multiple of the ranks."""

    tokens: Tensor  # int64 [t]
    position_ids: Tensor  # int64 [t]
    boundaries: Tensor  # int32 [segments + 1], of the whole row; the padding is one more segment
    longest: int  # length of the longest segment
    begin: int  # position of the slice's first token in the row
    num_tokens: int  # number of tokens before the padding
    scored: Tensor  # int64, positions in the row of the trained tokens that the states of this slice predict


class ContextParallel:
    """Divides rows over the ranks of a group; without a group, rows stay whole."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        self.size = 1 if group is None else group.size()

    def slice(self, row: MicroBatch) -> RowSlice:
        """Return this rank's slice of `row`."""
        if self._group is None:
            return RowSlice(row.tokens, row.position_ids, row.boundaries, row.longest, 0, len(row.tokens), row.scored)
        tokens, position_ids, boundaries, longest = row.tokens, row.position_ids, row.boundaries, row.longest
        if padding := -len(tokens) % self.size:
            positions = torch.arange(padding, device=tokens.device)
            tokens = torch.cat([tokens, torch.zeros_like(positions)])
            position_ids = torch.cat([position_ids, positions])
            boundaries = torch.cat([boundaries, boundaries[-1:] + padding])
            longest = max(longest, padding)
        length = len(tokens) // self.size
        begin = self._group.rank() * length
        mine = slice(begin, begin + length)
        first, last = np.searchsorted(row.scored_on_host, [begin, begin + length], side="right")
        scored = row.scored[first:last]
        num_tokens = min(max(len(row.tokens) - begin, 0), length)
        return RowSlice(tokens[mine], position_ids[mine], boundaries, longest, begin, num_tokens, scored)

    def sum_slices(self, values: Tensor) -> Tensor:
        """Sum values [..., T] over the ranks; each rank has the values of its slice, and 0 elsewhere."""
        return sum_forward(values, self._group)

    def scatter_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Convert [1, heads, t, D] of this slice to [1, heads / ranks, T, D] of the whole row.

        Key-value heads are repeated first if the ranks do not divide their number.
        """
        copies = math.lcm(key.shape[1], self.size) // key.shape[1]
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        parts = [x[0].unflatten(0, (self.size, -1)) for x in (query, key, value)]
        exchanged = all_to_all(torch.cat([part.flatten(1) for part in parts], 1), self._group)
        pieces = exchanged.split([part[0].numel() for part in parts], 1)
        shaped = [piece.unflatten(1, part.shape[1:]) for piece, part in zip(pieces, parts, strict=True)]
        return [x.transpose(0, 1).flatten(1, 2)[None] for x in shaped]

    def gather_heads(self, attended: Tensor) -> Tensor:
        """Convert [1, T, heads / ranks, D] of the whole row to [1, t, heads, D] of this slice."""
        exchanged = all_to_all(attended[0].unflatten(0, (self.size, -1)), self._group)
        return exchanged.transpose(0, 1).flatten(1, 2)[None]


def check_context_parallel(text: Any, config: TrainerModelConfig, cp: int) -> None:
    """Raise ConfigError if `cp` ranks cannot divide the heads of the model with the configuration `text`."""
    heads = text.num_attention_heads // config.tp
    kv_heads = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) // config.tp
    if heads % math.lcm(kv_heads, cp):
        raise ConfigError(
            f"model.cp {cp}: {config.name} has {heads} heads and {kv_heads} key-value heads"
            f"{' on each rank of model.tp' if config.tp > 1 else ''}, which {cp} ranks cannot divide evenly"
        )
