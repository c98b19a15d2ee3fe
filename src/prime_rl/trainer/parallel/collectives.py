"""Collectives with gradients, for computations that several ranks share.

The backward pass of each one is the transposed map: a sum for a copy, a split for a gather, and the other way round.
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
    """Sum over the group; each summand gets the gradient of the sum, which must be equal on all ranks."""
    return _LinearMap.apply(values, partial(_sum, group=group), _identity)


def sum_backward(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return `values`, which are equal on all ranks; their gradient is the sum of the ranks' gradients."""
    return _LinearMap.apply(values, _identity, partial(_sum, group=group))


def gather_last(part: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenate equal parts of the last dimension: [..., d] to [..., ranks * d]."""
    return _LinearMap.apply(part, partial(_gather, group=group), partial(_split, group=group))


def split_last(whole: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's part of the last dimension: [..., ranks * d] to [..., d]."""
    return _LinearMap.apply(whole, partial(_split, group=group), partial(_gather, group=group))


def all_to_all(
    values: Tensor, group: ProcessGroup, received: list[int] | None = None, sent: list[int] | None = None
) -> Tensor:
    """Exchange parts of the first dimension of `values` [N, ...], which are in rank order, between all ranks.

    `received` and `sent` are the sizes of the part from and for each rank; None means equal parts. Returns
    [sum of `received`, ...], in rank order.
    """
    forward = partial(_all_to_all, group=group, received=received, sent=sent)
    backward = partial(_all_to_all, group=group, received=sent, sent=received)
    return _LinearMap.apply(values, forward, backward)


class _LinearMap(torch.autograd.Function):
    """Applies a linear map, and its transpose to the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, apply: _Map, transpose: _Map) -> Tensor:
        ctx.transpose = transpose
        return apply(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(grad), None, None


def _identity(values: Tensor) -> Tensor:
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


def _all_to_all(values: Tensor, group: ProcessGroup, received: list[int] | None, sent: list[int] | None) -> Tensor:
    count = len(values) if received is None else sum(received)
    out = values.new_empty(count, *values.shape[1:])
    dist.all_to_all_single(out, values.contiguous(), received, sent, group=group)
    return out
