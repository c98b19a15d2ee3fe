"""Collectives that autograd goes through, for what several ranks compute together.

What is equal on all ranks of a group, and used by each for its part of the work, gets its gradient by a sum; a sum
hands its gradient on to every summand. Each is the other's backward pass, as gathering is that of splitting.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_Map = Callable[[Tensor], Tensor]


def sum_forward(values: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the group; every rank's summand gets the gradient of the sum, which must be equal on all."""
    summed: Tensor = _Linear.apply(values, partial(_sum, group=group), _same)
    return summed


def sum_backward(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return `values`, equal on all ranks; their gradient is the sum of what each rank's part of the work asks for."""
    same: Tensor = _Linear.apply(values, _same, partial(_sum, group=group))
    return same


def gather_last(part: Tensor, group: ProcessGroup) -> Tensor:
    """Put the equal parts of the last dimension together: [..., d] to [..., ranks * d]."""
    whole: Tensor = _Linear.apply(part, partial(_gather, group=group), partial(_split, group=group))
    return whole


def split_last(whole: Tensor, group: ProcessGroup) -> Tensor:
    """Take this rank's part of the last dimension: [..., ranks * d] to [..., d]."""
    part: Tensor = _Linear.apply(whole, partial(_split, group=group), partial(_gather, group=group))
    return part


def exchange(
    values: Tensor, group: ProcessGroup, received: list[int] | None = None, sent: list[int] | None = None
) -> Tensor:
    """All-to-all over the first dimension.

    Args:
        values: [N, ...], what goes to rank 0 first, then what goes to rank 1, ...
        group: the ranks.
        received: how many come from each rank; equal parts if None.
        sent: how many go to each rank; equal parts if None.

    Returns:
        [sum of `received`, ...], what came from rank 0 first.
    """
    there = partial(_swap, group=group, received=received, sent=sent)
    back = partial(_swap, group=group, received=sent, sent=received)
    swapped: Tensor = _Linear.apply(values, there, back)
    return swapped


class _Linear(torch.autograd.Function):
    """A linear map that goes there, and the transposed one that brings the gradient back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, there: _Map, back: _Map) -> Tensor:
        ctx.back = back
        return there(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _same(values: Tensor) -> Tensor:
    return values.view_as(values)


def _sum(values: Tensor, group: ProcessGroup) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(part: Tensor, group: ProcessGroup) -> Tensor:
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, -1)


def _split(whole: Tensor, group: ProcessGroup) -> Tensor:
    return whole.chunk(group.size(), -1)[group.rank()].contiguous()


def _swap(values: Tensor, group: ProcessGroup, received: list[int] | None, sent: list[int] | None) -> Tensor:
    count = len(values) if received is None else sum(received)
    out = values.new_empty(count, *values.shape[1:])
    dist.all_to_all_single(out, values.contiguous(), received, sent, group=group)
    return out
