"""Attention inside each segment of a row as one operator that torch.compile does not look into.

How many segments a row has and where they end is data: a compiler that looked inside would stop at every boundary,
and compile again for every row. For CPUs; torch's kernel for segments on CUDA is such an operator itself. The kernels
are those of `scaled_dot_product_attention` on a CPU, so compiled and eager blocks agree (I8).
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.library.custom_op("prime_rl::segment_attention", mutates_args=())
def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each segment.

    Args:
        query: [1, heads, T, D]; key and value: [1, kv_heads, T, D].
        bounds: int32 [segments + 1], 0 first and T last.
        scale: factor on the scores; 1/sqrt(D) if None.
        window: a token sees this many tokens, itself included; all if None.

    Returns:
        [1, heads, T, D], and the logarithms of the softmax's normalisers, float32 [1, heads, T].
    """
    out = query.new_empty(query.shape)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    groups = query.shape[1] // key.shape[1]
    for part, mask in _segments(bounds, window, query.dtype):
        q, k, v = query[:, :, part], _repeat(key[:, :, part], groups), _repeat(value[:, :, part], groups)
        out[:, :, part], lse[:, :, part] = _forward(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
    return out, lse


@torch.library.custom_op("prime_rl::segment_attention_backward", mutates_args=())
def _segment_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = tuple(torch.empty(x.shape, dtype=x.dtype) for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    for part, mask in _segments(bounds, window, query.dtype):
        q, k, v = query[:, :, part], _repeat(key[:, :, part], groups), _repeat(value[:, :, part], groups)
        last = (out[:, :, part], lse[:, :, part], 0.0, mask is None)
        dq, dk, dv = _backward(grad[:, :, part], q, k, v, *last, attn_mask=mask, scale=scale)
        grads[0][:, :, part] = dq
        grads[1][:, :, part], grads[2][:, :, part] = _sum_groups(dk, groups), _sum_groups(dv, groups)
    return grads


def _segments(bounds: Tensor, window: int | None, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield each segment's place and, where a window cuts it, what is added to its scores."""
    ends = bounds.tolist()
    for begin, end in pairwise(ends):
        length, mask = end - begin, None
        if window is not None and window < length:
            seen = torch.ones(length, length, dtype=torch.bool).tril_().triu_(1 - window)
            mask = torch.zeros(length, length, dtype=dtype).masked_fill_(~seen, float("-inf"))
        yield slice(begin, end), mask


def _repeat(heads: Tensor, groups: int) -> Tensor:
    return heads if groups == 1 else heads.repeat_interleave(groups, 1)


def _sum_groups(grad: Tensor, groups: int) -> Tensor:
    return grad if groups == 1 else grad.unflatten(1, (-1, groups)).sum(2)


@segment_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: Any, window: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=torch.float32)


@_segment_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bounds, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, bounds)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = _segment_attention_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.window)
    return (*grads, None, None, None)


segment_attention.register_autograd(_differentiate, setup_context=_keep)
