"""Attention inside one short segment in half precision on a CPU, as matrix products.

The backward pass of torch's own kernel is slow there (2.13, segments of 120 tokens: half of what it takes in float32,
where products are a fifth); for longer segments it wins, because these products compute the upper half as well and keep
all weights. Scores and softmax are in float32, as in that kernel: a product of halves is a half on a CPU, which would
round a score of 20 by up to 0.06, and its weight by 6 %. What is propagated back through them are products of halves.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LONGEST = 512
"""Segments up to this many tokens are faster this way."""


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scale: float | None) -> Tensor:
    """Attend within one segment.

    Args:
        query: [1, heads, T, D].
        key: [1, kv_heads, T, D].
        value: [1, kv_heads, T, E].
        seen: bool [T, T], which tokens each one sees; those up to itself if None.
        scale: factor on the scores; 1/sqrt(D) if None.

    Returns:
        [1, heads, T, E].
    """
    if seen is None:
        seen = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril_()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # Query heads that share a key head are rows of one product.
    shared = query[0].reshape(key.shape[1], -1, query.shape[-1])
    attended: Tensor = _Attend.apply(shared, key[0], value[0], ~seen, scale)
    return attended.view(1, query.shape[1], query.shape[2], -1)


class _Attend(torch.autograd.Function):
    """P = softmax(scale Q K^T); dS = P * (dP - rowsum(dP * P)), the row sum being that of dO * O."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float) -> Tensor:
        scores = torch.bmm(query.float(), key.float().transpose(1, 2)).mul_(scale)
        scores.unflatten(1, (-1, key.shape[1])).masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores, -1, out=scores).to(query.dtype)
        attended = torch.bmm(weights, value)
        ctx.save_for_backward(query, key, value, weights, attended)
        ctx.scale = scale
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weights, attended = ctx.saved_tensors
        grad = grad.contiguous()
        slope = torch.bmm(grad, value.transpose(1, 2)).float()
        slope.sub_((grad.float() * attended.float()).sum(-1, keepdim=True)).mul_(weights)
        slope = slope.mul_(ctx.scale).to(query.dtype)
        grad_value = torch.bmm(weights.transpose(1, 2), grad)
        return torch.bmm(slope, key), torch.bmm(slope.transpose(1, 2), query), grad_value, None, None
