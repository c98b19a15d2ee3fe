"""Attention over packed rows, which never crosses the boundary between two segments (I8).

Registered with transformers as `rl_varlen`. The block-diagonal mask that transformers derives from position ids costs
time quadratic in the row, and transformers ignores the segments if it gets an attention mask as well.
"""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from loguru import logger
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl
from transformers import AttentionInterface

from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.trainer.attention import attention_sinks
from prime_rl.trainer.parallel.context_parallel import ContextParallel

ATTENTION_NAME = "rl_varlen"
_HOPPER = (9, 0)


def implementation(attn: str) -> str:
    """Register the attention with transformers, and return transformers' name for `attn` (`model.attn`).

    `auto` is torch's varlen kernel, with FlashAttention-3 on Hopper GPUs if it is installed.
    """
    # Without a mask function transformers creates no mask. With one it would read the position ids, which on CUDA waits
    # for all earlier kernels.
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    if attn == "auto":
        _activate_flash_attention_3()
    return ATTENTION_NAME if attn in ("auto", "varlen") else attn


@cache
def _activate_flash_attention_3() -> None:
    """Use FlashAttention-3 for torch's flash kernels, forward and backward."""
    if find_spec("flash_attn_interface") is None or not torch.cuda.is_available():
        return
    if torch.cuda.get_device_capability() < _HOPPER:
        return
    try:
        activate_flash_attention_impl("FA3")
    except (RuntimeError, ImportError) as error:  # built for another torch or CUDA
        logger.warning("FlashAttention-3 is installed but cannot be used: {}", summarize_exception(error))
        return
    logger.info("attention: FlashAttention-3; model.attn = 'varlen' selects torch's FlashAttention-2")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    context_parallel: ContextParallel | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each segment of one packed row; the signature is transformers'.

    Args:
        query: [1, heads, T, D]; key and value: [1, kv_heads, T, D]; T is this rank's slice under context parallelism.
        attention_mask: must be None; `cu_seq_lens_q` gives the segments.
        cu_seq_lens_q: int32 [segments + 1], 0 first and T last.
        max_length_q: length of the longest segment.
        scaling: factor on the scores; 1/sqrt(D) if None.
        sliding_window: number of tokens that a token attends to, itself included; all if None.
        softcap: limit of the scores: softcap * tanh(scores / softcap).
        s_aux: [heads], attention sinks: a score in each softmax that belongs to no token.
        context_parallel: the ranks that share the row; None if it is whole.

    Returns:
        [1, T, heads, D], contiguous (some models view it as [1, T, heads * D]), and None.

    Raises:
        ConfigError: the model does not pass the segments on, creates its own mask, or combines sinks or softcapped
            scores with context parallelism.
    """
    if attention_mask is not None:
        raise ConfigError(
            f"model.name: {type(module).__name__} creates its own attention mask, which the kernels for packed rows do "
            "not support"
        )
    if cu_seq_lens_q is None:
        raise ConfigError(
            f"model.name: {type(module).__name__} does not get the segment boundaries, so packed rows are not supported"
        )
    if (softcap is not None or s_aux is not None) and context_parallel is not None:
        raise ConfigError(
            "model.cp: context parallelism does not support softcapped scores or attention sinks; set model.cp.degree=1"
        )
    if softcap is not None:
        pieces = _split_segments(query, key, value, cu_seq_lens_q)
        explicit = [_attend_explicitly(*piece, scaling, sliding_window, softcap, s_aux) for piece in pieces]
        return torch.cat(explicit, 2).transpose(1, 2).contiguous(), None
    if s_aux is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if sliding_window is not None and sliding_window < max_length_q:
            attended = attention_sinks.attend_window_with_sinks(
                query, key, value, cu_seq_lens_q, scale, sliding_window, s_aux
            )
        else:
            attended = attention_sinks.attend_with_sinks(
                query, key, value, cu_seq_lens_q, max_length_q, scale, s_aux, _attend_segments
            )
        return attended.contiguous(), None
    if context_parallel is not None:
        query, key, value = context_parallel.scatter_heads(query, key, value)
    attended = _attend_segments(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    attended = attended if context_parallel is None else context_parallel.gather_heads(attended)
    return attended.contiguous(), None


def _attend_segments(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    """Attend with the kernel for the device and dtype; return [1, T, heads, D]."""
    if query.is_cuda and query.dtype != torch.float32:  # the flash kernel supports half precision only
        return _flash(query, key, value, bounds, longest, scaling, window)
    if torch.compiler.is_compiling() and query.device.type == "cpu" and value.shape[-1] == query.shape[-1]:
        return segment_attention(query, key, value, bounds, scaling, window)[0].transpose(1, 2)
    return _attend_by_length(query, key, value, bounds, scaling, window)


def _attend_by_length(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """Attend with one kernel call for all segments of the same length; return [1, T, heads, D].

    A row of a thousand short segments has few different lengths, and a call costs more than the work of such a segment.
    """
    lengths = bounds.diff().long()
    order = lengths.repeat_interleave(lengths).argsort(stable=True)  # tokens, shortest segments first
    packed = [x[0].transpose(0, 1)[order] for x in (query, key, value)]
    distinct, counts = lengths.unique(return_counts=True)
    sizes = (distinct * counts).tolist()
    attended = []
    for length, *tokens in zip(distinct.tolist(), *(x.split(sizes) for x in packed), strict=True):
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in tokens)  # [segments, heads, length, D]
        attended.append(_attend_segment(q, k, v, scaling, window).transpose(1, 2).flatten(0, 1))
    return torch.cat(attended)[order.argsort()][None]


def _split_segments(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    lengths = (bounds[1:] - bounds[:-1]).tolist()
    return zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), strict=True)


def _attend_segment(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Attend within segments of the same length, [segments, heads, length, D]."""
    length, mask = query.shape[2], None
    if window is not None and window < length:
        ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
        mask = ones.tril_().triu_(1 - window)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )


def _attend_explicitly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    window: int | None,
    softcap: float,
    sink_scores: Tensor | None,
) -> Tensor:
    """Attend with all scores of the segment in memory, for softcapped scores, which no kernel supports."""
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_()
    if window is not None:
        visible.triu_(1 - window)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sink_scores is not None:
        extra = sink_scores.view(1, -1, 1, 1).expand(len(scores), -1, length, 1)
        scores = torch.cat([scores, extra.to(scores.dtype)], 3)
    return torch.softmax(scores, 3, dtype=torch.float32)[..., :length].to(value.dtype) @ value


def _flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    grouped = query.shape[1] != key.shape[1]
    width = value.shape[-1]
    if width != query.shape[-1]:  # latent attention; the kernel requires equal head dimensions
        value = F.pad(value, (0, query.shape[-1] - width))
    packed = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
    left = -1 if window is None else window - 1
    out = varlen_attn(
        *packed, bounds, bounds, longest, longest, scale=scaling, window_size=(left, 0), enable_gqa=grouped
    )
    return out[None, ..., :width]


# A custom operator, because torch.compile would break the graph at every segment boundary and compile again for every
# row. CUDA's varlen kernel is such an operator already. The kernels are those of `scaled_dot_product_attention` on a
# CPU, so compiled and eager blocks agree (I8).
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.library.custom_op("prime_rl::segment_attention", mutates_args=())
def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attend causally within each segment; arguments as in `packed_attention`.

    Returns [1, heads, T, D], and the log-sum-exp of the scores, float32 [1, heads, T].
    """
    out = query.new_empty(query.shape)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    groups = query.shape[1] // key.shape[1]
    for part, mask in _segments(bounds, window, query.dtype):
        q, k, v = query[:, :, part], *(x[:, :, part].repeat_interleave(groups, 1) for x in (key, value))
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
        q, k, v = query[:, :, part], *(x[:, :, part].repeat_interleave(groups, 1) for x in (key, value))
        last = (out[:, :, part], lse[:, :, part], 0.0, mask is None)
        dq, dk, dv = _backward(grad[:, :, part], q, k, v, *last, attn_mask=mask, scale=scale)
        grads[0][:, :, part] = dq
        for whole, grad_part in zip(grads[1:], (dk, dv), strict=True):
            whole[:, :, part] = grad_part.unflatten(1, (-1, groups)).sum(2)
    return grads


def _segments(bounds: Tensor, window: int | None, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield each segment's slice and, if the window is shorter, the mask that is added to its scores."""
    ends = bounds.tolist()
    for begin, end in pairwise(ends):
        length, mask = end - begin, None
        if window is not None and window < length:
            visible = torch.ones(length, length, dtype=torch.bool).tril_().triu_(1 - window)
            mask = torch.zeros(length, length, dtype=dtype).masked_fill_(~visible, float("-inf"))
        yield slice(begin, end), mask


@segment_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: Any, window: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=torch.float32)


@_segment_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bounds, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, bounds)


def _segment_attention_grad(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = _segment_attention_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.window)
    return (*grads, None, None, None)


segment_attention.register_autograd(_segment_attention_grad, setup_context=_setup_context)
