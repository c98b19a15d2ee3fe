"""Attention sinks (GPT-OSS) with memory linear in the row.

A sink is one more score s_h in each softmax of head h without a value; it reduces the other weights. For layers without
a window it becomes a token before each segment, so any kernel can compute it: two more features of the queries hold
s_h / scale, they are 1 in the sink's key and 0 in all other keys, and the sink's value is 0. Two features, because
s_h / scale is split into a rounded value and a remainder, which half precision would lose. With a window the sink would
lie outside of it; there queries of one block attend to the keys of two blocks.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_MULTIPLE = 8
"""Flash kernels require head dimensions that are multiples of this."""

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None, int | None], Tensor]


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, sinks: Tensor, kernel: Kernel
) -> Tensor:
    """Attend causally within each segment and to its sink, without reads from the device; return [1, T, heads, D].

    Arguments are as in `packed_attention`. `sinks` [heads] are the scores, `kernel` is the attention without sinks:
    (query, key, value, bounds, longest, scale, window).
    """
    length, width, segments = query.shape[2], query.shape[3], len(bounds) - 1
    positions = torch.arange(length, device=query.device)
    targets = positions + _segment_of(positions, bounds) + 1  # one sink before each segment
    numbers = torch.arange(segments + 1, device=query.device)
    num_added = -(width + 2) % _MULTIPLE + 2
    scores = (sinks.float() / scale).view(1, -1, 1, 1).expand(-1, -1, length, -1)
    rounded = scores.to(query.dtype)
    remainder = (scores - rounded.float()).to(query.dtype)
    query = F.pad(torch.cat([query, rounded, remainder], 3), (0, num_added - 2))
    row = (1, -1, length + segments, width + num_added)
    new_query = query.new_zeros(row[0], query.shape[1], *row[2:]).index_copy(2, targets, query)
    new_key, new_value = (
        x.new_zeros(row[0], x.shape[1], row[2], width + num_added).index_copy(
            2, targets, F.pad(x, (0, width + num_added - x.shape[3]))
        )
        for x in (key, value)
    )
    marks = F.pad(key.new_ones(1, key.shape[1], segments, 2), (width, num_added - 2))
    new_key = new_key.index_copy(2, bounds[:-1] + numbers[:-1], marks)
    attended = kernel(new_query, new_key, new_value, (bounds + numbers).to(bounds.dtype), longest + 1, scale, None)
    return attended.index_select(1, targets)[..., : value.shape[3]]


def attend_window_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, window: int, sinks: Tensor
) -> Tensor:
    """Attend within each segment to the last `window` tokens, the query's token included, and to the sink.

    Args and result as `attend_with_sinks`. The queries of a block of `window` tokens attend to its keys and to those of
    the previous block.
    """
    heads, length = query.shape[1:3]
    groups = heads // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    padding = -length % window
    query, key, value = (F.pad(x[0], (0, 0, 0, padding)).unflatten(1, (-1, window)) for x in (query, key, value))
    key, value = (torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1], x], 2) for x in (key, value))
    positions = torch.arange(length + padding, device=query.device).unflatten(0, (-1, window))
    key_positions = torch.cat([positions - window, positions], 1)
    distance = positions[:, :, None] - key_positions[:, None, :]
    same = _segment_of(positions, bounds)[:, :, None] == _segment_of(key_positions.clamp(min=0), bounds)[:, None, :]
    visible = (distance >= 0) & (distance < window) & same & (key_positions >= 0)[:, None, :]
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~visible, float("-inf"))
    extra = sinks.view(-1, 1, 1, 1).expand(-1, *scores.shape[1:3], 1).to(scores.dtype)
    weights = torch.softmax(torch.cat([scores, extra], 3), 3, dtype=torch.float32)[..., :-1]
    attended = (weights.to(value.dtype) @ value).flatten(1, 2)[:, :length]
    return attended.transpose(0, 1)[None]


def _segment_of(positions: Tensor, bounds: Tensor) -> Tensor:
    """Return the segment of each position; positions behind the row form one more segment."""
    return torch.searchsorted(bounds[1:].contiguous(), positions.to(bounds.dtype).contiguous(), right=True)
