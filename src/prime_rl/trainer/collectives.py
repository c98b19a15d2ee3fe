"""Collectives that autograd goes through, for what several ranks compute together.

What is equal on all ranks of a group, and used by each for its part of the work, gets its gradient by a sum; a sum
hands its gradient on to every summand. Each is the other's backward pass, as gathering is that of splitting.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def sum_forward(values: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the group; every rank's summand gets the gradient of the sum, which must be equal on all."""
    summed: Tensor = _SumForward.apply(values, group)
    return summed


def sum_backward(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return `values`, equal on all ranks; their gradient is the sum of what each rank's part of the work asks for."""
    same: Tensor = _SumBackward.apply(values, group)
    return same


def gather_last(part: Tensor, group: ProcessGroup) -> Tensor:
    """Put the equal parts of the last dimension together: [..., d] to [..., ranks * d]."""
    whole: Tensor = _GatherLast.apply(part, group)
    return whole


def split_last(whole: Tensor, group: ProcessGroup) -> Tensor:
    """Take this rank's part of the last dimension: [..., ranks * d] to [..., d]."""
    part: Tensor = _SplitLast.apply(whole, group)
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
    swapped: Tensor = _Exchange.apply(values, group, received, sent)
    return swapped


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        return _sum(values, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _split(grad, ctx.group), None


class _SplitLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _split(whole, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.group), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, group: ProcessGroup, received: list[int] | None, sent: list[int] | None
    ) -> Tensor:
        ctx.group, ctx.received, ctx.sent = group, received, sent
        return _swap(values, group, received, sent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _swap(grad, ctx.group, ctx.sent, ctx.received), None, None, None


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
