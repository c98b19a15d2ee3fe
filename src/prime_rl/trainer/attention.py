"""I8 packing is invisible: attention over a packed row never crosses the boundary between two segments.

Registered with transformers as `rl_varlen`, and as `rl_varlen_long` where cuDNN may help. transformers' own route, a
block-diagonal mask derived from position ids, costs time quadratic in the row and is silently dropped when an attention
mask is passed as well.
"""

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from prime_rl.errors import ConfigError
from prime_rl.trainer import cudnn_attention, half_attention
from prime_rl.trainer.context_parallel import ContextParallel
from prime_rl.trainer.segment_op import segment_attention

NAME = "rl_varlen"
LONG_NAME = "rl_varlen_long"


def register() -> None:
    """Make both names known to transformers. Calling it again changes nothing.

    Deliberately without a mask function: transformers then makes no mask at all, where for a known one it would first
    look at the position ids, and on CUDA wait for every kernel before it.
    """
    AttentionInterface.register(NAME, rl_varlen)
    AttentionInterface.register(LONG_NAME, rl_varlen_long)


def implementation(attn: str) -> str:
    """Name for transformers of what `model.attn` asks for; `auto` looks at the device."""
    if attn == "auto":
        return LONG_NAME if _cudnn_works() else NAME
    return NAME if attn == "varlen" else attn


def rl_varlen_long(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """`rl_varlen`, which leaves long rows of one segment in half precision to cuDNN."""
    special = ("sliding_window", "softcap", "s_aux", "context_parallel")
    segments, length = options.get("cu_seq_lens_q"), query.shape[2]
    alone = segments is not None and len(segments) == 2 and length >= cudnn_attention.LEAST_TOKENS
    plain = query.is_cuda and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1] <= 128
    if alone and plain and attention_mask is None and all(options.get(name) is None for name in special):
        attended = cudnn_attention.attend(query, key, value, options.get("scaling"))
        return attended.transpose(1, 2).contiguous(), None
    return rl_varlen(module, query, key, value, attention_mask, **options)


def rl_varlen(
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
    """Causal attention inside each segment of one packed row.

    Args:
        module: the attention layer (unused; the signature is transformers').
        query: [1, heads, T, D]; key and value: [1, kv_heads, T, D]; T is this rank's slice where ranks share the row.
        attention_mask: None; segments are given by `cu_seq_lens_q`.
        cu_seq_lens_q: int32 [segments + 1], 0 first and T last.
        max_length_q: length of the longest segment.
        scaling: factor on the scores; 1/sqrt(D) if None.
        sliding_window: a token sees this many tokens, itself included; all if None.
        softcap: bound on the scores, applied as softcap * tanh(scores / softcap).
        s_aux: [heads], a score in each softmax that belongs to no token (attention sink).
        context_parallel: the ranks that share the row; None where it is whole.

    Returns:
        [1, T, heads, D], contiguous because some models view it as [1, T, heads * D], and None.

    Raises:
        ConfigError: the model does not hand on the segments, or makes a mask by itself, or has sinks or softcapped
            scores and ranks share rows.
    """
    if attention_mask is not None:
        raise ConfigError(
            f"model.name: {type(module).__name__} chooses by a mask of its own what a token attends to, which the "
            "kernels for packed rows do not take"
        )
    if cu_seq_lens_q is None:
        raise ConfigError(
            f"model.name: {type(module).__name__} is not told where segments begin, so packed rows cannot be kept apart"
        )
    if softcap is not None or s_aux is not None:
        if context_parallel is not None:
            raise ConfigError("model.cp: ranks cannot share rows of a model with softcapped scores or attention sinks")
        lengths = (cu_seq_lens_q[1:] - cu_seq_lens_q[:-1]).tolist()
        pieces = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
        explicit = [_explicit_segment(*piece, scaling, sliding_window, softcap, s_aux) for piece in pieces]
        return torch.cat(explicit, 2).transpose(1, 2).contiguous(), None
    if context_parallel is not None:
        query, key, value = context_parallel.spread_heads(query, key, value)
    if query.is_cuda and query.dtype != torch.float32:  # the flash kernel knows half precision only
        attended = _flash(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    elif torch.compiler.is_compiling() and query.device.type == "cpu" and value.shape[-1] == query.shape[-1]:
        attended = segment_attention(query, key, value, cu_seq_lens_q, scaling, sliding_window)[0].transpose(1, 2)
    else:
        lengths = (cu_seq_lens_q[1:] - cu_seq_lens_q[:-1]).tolist()
        parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
        attended = torch.cat([_segment(*part, scaling, sliding_window) for part in parts], 2).transpose(1, 2)
    attended = attended if context_parallel is None else context_parallel.gather_heads(attended)
    return attended.contiguous(), None


def _segment(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    length, mask = query.shape[2], None
    if window is not None and window < length:
        ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
        mask = ones.tril_().triu_(1 - window)
    if query.dtype != torch.float32 and query.device.type == "cpu" and length <= half_attention.LONGEST:
        return half_attention.attend(query, key, value, mask, scaling)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )


def _explicit_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """What no kernel here computes, with all scores of the segment in memory: quadratic in its length."""
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_()
    if window is not None:
        seen.triu_(1 - window)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(len(scores), -1, length, 1).to(scores.dtype)], 3)
    return torch.softmax(scores, 3, dtype=torch.float32)[..., :length].to(value.dtype) @ value


def _flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    extra: dict[str, Any] = {}
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and _knows_grouped_queries():
        extra["enable_gqa"] = True
    elif groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    width = value.shape[-1]
    if width != query.shape[-1]:  # latent attention: the kernel wants one head dimension
        value = F.pad(value, (0, query.shape[-1] - width))
    packed = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
    behind = -1 if window is None else window - 1
    out = varlen_attn(*packed, bounds, bounds, longest, longest, scale=scaling, window_size=(behind, 0), **extra)
    return out[None, ..., :width]


@cache
def _cudnn_works() -> bool:
    return cudnn_attention.works_here()


@cache
def _knows_grouped_queries() -> bool:
    """torch 2.11 has no `enable_gqa` yet."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
