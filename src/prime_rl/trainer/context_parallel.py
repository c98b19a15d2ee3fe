"""I9 for long rows: several ranks share one packed row, and loss and gradients are those of one rank.

Each rank holds a contiguous slice of the row's tokens. Around the attention of every layer an all-to-all turns slices
of tokens with all heads into all tokens with a share of the heads, and back (DeepSpeed-Ulysses, Jacobs et al. 2023,
arXiv:2309.14509), so attention itself sees whole segments and is not aware of it. Each rank scores the tokens that its
slice predicts; their sum over ranks, of which a token has one summand that is not 0, is the row that the loss sees.
Every rank computes the same loss and takes home the gradient of its own slice: what FSDP sums is counted once.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.errors import ConfigError
from prime_rl.trainer.collectives import exchange, sum_forward
from prime_rl.trainer.micro_batch import MicroBatch

_WHOLE_ROW_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class RowSlice:
    """What one rank puts through the model.

    Attributes:
        tokens: int64 [t], of the row filled up to a multiple of the ranks.
        position_ids: int64 [t].
        boundaries: int32 [segments + 1], of the whole row; what it was filled up with is a segment of its own.
        longest: length of the longest segment.
        begin: place of the slice's first token in the row.
        filled: how many of the tokens, from the first on, are the row's own.
        scored: int64, the trained tokens that the states of this slice predict, as places in the row.
    """

    tokens: Tensor
    position_ids: Tensor
    boundaries: Tensor
    longest: int
    begin: int
    filled: int
    scored: Tensor


class ContextParallel:
    """The ranks that share each row; a group of one holds whole rows and exchanges nothing."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        """Take the group; None for a rank by itself."""
        self._group = group
        self.size = 1 if group is None else group.size()

    def slice(self, row: MicroBatch) -> RowSlice:
        """Cut this rank's slice out of `row`."""
        if self._group is None:
            return RowSlice(row.tokens, row.position_ids, row.boundaries, row.longest, 0, len(row.tokens), row.scored)
        tokens, position_ids, boundaries, longest = row.tokens, row.position_ids, row.boundaries, row.longest
        missing = -len(tokens) % self.size
        if missing:
            places = torch.arange(missing, device=tokens.device)
            tokens = torch.cat([tokens, torch.zeros_like(places)])
            position_ids = torch.cat([position_ids, places])
            boundaries = torch.cat([boundaries, boundaries[-1:] + missing])
            longest = max(longest, missing)
        length = len(tokens) // self.size
        begin = self._group.rank() * length
        mine = slice(begin, begin + length)
        scored = row.scored[(row.scored > begin) & (row.scored <= begin + length)]
        filled = min(max(len(row.tokens) - begin, 0), length)
        return RowSlice(tokens[mine], position_ids[mine], boundaries, longest, begin, filled, scored)

    def whole(self, values: Tensor) -> Tensor:
        """Put a row of [T] values together, of which every rank has those of its slice, and 0 elsewhere."""
        return values if self._group is None else sum_forward(values, self._group)

    def spread_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Turn [1, heads, t, D] of this slice into [1, heads / ranks, T, D] of the whole row.

        Fewer key-value heads than ranks (or a number that the ranks do not divide) are repeated first.
        """
        if self._group is None:
            return [query, key, value]
        copies = math.lcm(key.shape[1], self.size) // key.shape[1]
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        parts = [x[0].unflatten(0, (self.size, -1)) for x in (query, key, value)]
        swapped = exchange(torch.cat([part.flatten(1) for part in parts], 1), self._group)
        pieces = swapped.split([part[0].numel() for part in parts], 1)
        shaped = [piece.unflatten(1, part.shape[1:]) for piece, part in zip(pieces, parts, strict=True)]
        return [x.transpose(0, 1).flatten(1, 2)[None] for x in shaped]

    def gather_heads(self, attended: Tensor) -> Tensor:
        """Turn [1, T, heads / ranks, D] of the whole row into [1, t, heads, D] of this slice."""
        if self._group is None:
            return attended
        swapped = exchange(attended[0].unflatten(0, (self.size, -1)), self._group)
        return swapped.transpose(0, 1).flatten(1, 2)[None]


def check_context_parallel(text: Any, config: TrainerModelConfig, cp: int) -> None:
    """Refuse what `cp` ranks cannot compute exactly together.

    Args:
        text: transformers' configuration of the language model.
        config: how it is laid out.
        cp: ranks that share each row.

    Raises:
        ConfigError: the heads cannot be divided, or positions depend on the length of the row.
    """
    heads = text.num_attention_heads // config.tp
    kv_heads = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) // config.tp
    if heads % math.lcm(kv_heads, cp):
        raise ConfigError(
            f"model.cp {cp}: {config.name} has {heads} heads and {kv_heads} key-value heads"
            f"{' on each rank of model.tp' if config.tp > 1 else ''}, which {cp} ranks cannot share evenly"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type"), *(r.get("rope_type") for r in rope.values() if isinstance(r, dict))}
    if odd := kinds & _WHOLE_ROW_ROPE:
        raise ConfigError(f"model.cp: the positions of {config.name} ({odd.pop()}) depend on the row's length")
