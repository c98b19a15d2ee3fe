"""Layers over packed rows, which never cross the boundary between two segments, and rotary frequencies (I6, I8).

Registered with transformers as `rl_varlen`. The block-diagonal mask that transformers derives from position ids costs
time quadratic in the row, and transformers ignores the segments if it gets an attention mask as well.

Attention sinks (GPT-OSS) take memory linear in the row. A sink is one more score s_h in each softmax of head h without
a value; it reduces the other weights. For layers without a window it becomes a token before each segment, so any kernel
can compute it: two more features of the queries hold s_h / scale, they are 1 in the sink's key and 0 in all other keys,
and the sink's value is 0. Two features, because s_h / scale is split into a rounded value and a remainder, which half
precision would lose. With a window the sink would lie outside of it; there queries of one block attend to the keys of
two blocks.

Recurrent layers (gated delta nets, Mamba-2, short convolutions) run on batches of segments of similar length, padded at
the end, where zeros cannot change earlier tokens. transformers has kernels that take boundaries in rows, but only on a
GPU; its own code for them ignores the boundaries.

Rotary frequencies depend on the configured length, never on a row's. transformers selects those of `longrope` and
`dynamic` by the longest position in each forward pass. In a packed row that depends on the other samples, and an
inference engine cannot do so, because the keys in its cache are already rotated. vLLM therefore selects them once at
start, and the trainer does the same:

- longrope: the long factors for all positions if `max_model_len` exceeds `original_max_position_embeddings`, else the
  short ones. vLLM's default `max_model_len` is `original_max_position_embeddings`.
- dynamic: the frequencies for `max_position_embeddings`; longer sequences are refused.

The other kinds (yarn, llama3, linear) have fixed frequencies.
"""

import inspect
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from loguru import logger
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.trainer.parallel.device_mesh import ContextParallel

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
        lengths = cu_seq_lens_q.diff().tolist()
        pieces = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
        explicit = [_attend_explicitly(*piece, scaling, sliding_window, softcap, s_aux) for piece in pieces]
        return torch.cat(explicit, 2).transpose(1, 2).contiguous(), None
    if s_aux is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if sliding_window is not None and sliding_window < max_length_q:
            attended = attend_window_with_sinks(query, key, value, cu_seq_lens_q, scale, sliding_window, s_aux)
        else:
            attended = attend_with_sinks(query, key, value, cu_seq_lens_q, max_length_q, scale, s_aux, _attend_segments)
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


_HEAD_MULTIPLE = 8
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
    num_added = -(width + 2) % _HEAD_MULTIPLE + 2
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


_SHORT = 16
"""Segments up to this length form one batch, so that a row has few."""


def segment_batches(bounds: Tensor) -> list[Tensor]:
    """Return positions [segments, length] of the tokens of segments with similar lengths, shortest first.

    Padding, at the end, is the position behind the row; all but short segments become less than twice as long.
    """
    ends = bounds.tolist()
    groups: dict[int, list[tuple[int, int]]] = {}
    for begin, end in sorted(pairwise(ends), key=lambda segment: segment[1] - segment[0]):
        groups.setdefault((max(_SHORT, end - begin) - 1).bit_length(), []).append((begin, end))
    batches = []
    for segments in groups.values():
        begin, end = torch.tensor(segments)[..., None].unbind(1)
        positions = begin + torch.arange(int((end - begin).max()))
        batches.append(positions.where(positions < end, ends[-1]).to(bounds.device))
    return batches


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that mix tokens by a causal convolution and can run on `segment_batches`, in order."""
    layers = []
    for module in model.modules():
        parameters = inspect.signature(type(module).forward).parameters.values()
        has_convolution = any(isinstance(child, nn.Conv1d) and child.groups > 1 for child in module.children())
        names = {one.name if one.kind != one.VAR_KEYWORD else "seq_idx" for one in parameters}
        if has_convolution and {"hidden_states", "seq_idx"} <= names:
            layers.append(module)
    return layers


@cache
def segmented_class(kind: Any) -> type:
    """Return a subclass of a recurrent layer with a new state for each segment. One class per kind, as in routers.

    Its forward gets `segment_batches` as `seq_idx`, transformers' name for a row's segments, which all blocks pass on.
    """

    @torch.compiler.disable  # the batches have other shapes in every row
    def forward(layer: Any, hidden_states: Tensor, *_: Any, seq_idx: list[Tensor] | None = None, **__: Any) -> Tensor:
        if seq_idx is None:
            raise ConfigError(
                f"model.name: {kind.__name__} does not get the segments, so packed rows are not supported"
            )
        row = F.pad(hidden_states[0], (0, 0, 0, 1))
        mixed = torch.cat([kind.forward(layer, row[positions]).flatten(0, 1) for positions in seq_idx])
        order = torch.cat([positions.flatten() for positions in seq_idx])
        return mixed.new_zeros(len(row), mixed.shape[1]).index_copy(0, order, mixed)[None, :-1]

    return type(kind.__name__, (kind,), {"forward": forward})


_FIXED_LONGROPE = "prime_rl_longrope"
"""Name of longrope without transformers' update in each forward pass, which also reads from the device."""


def fix_frequencies(name: str, causal_lm: PreTrainedModel, max_model_len: int | None, seq_len: int) -> None:
    """Set the frequencies of the rotary embeddings to those of vLLM, in place, before the buffers are computed.

    The model's configuration, which is published with the weights, does not change. `max_model_len` is the sequence
    length limit of the inference engine; None is its default, and `seq_len`, the longest row, limits the samples.
    Raises ConfigError if frequencies are dynamic and sequences may exceed their positions, or the frequencies are
    longrope's and the engine's default is unknown.
    """
    text, length = causal_lm.config.get_text_config(), max_model_len or seq_len
    limit = max_dynamic_length(text)
    if limit is not None and length > limit:
        raise ConfigError(
            f"model.max_model_len: {name} has dynamic rotary frequencies, which depend on the length of samples above "
            f"{limit} tokens, but sequences may have {length} tokens; set model.max_model_len (seq_len, if it is "
            f"not set) to at most {limit}"
        )
    kinds = {parameters.get("rope_type") for parameters in rope_parameters(text)}
    if "longrope" in kinds and max_model_len is None:
        default: int | None = getattr(causal_lm.config, "original_max_position_embeddings", None)
        if default is None:
            raise ConfigError(
                f"model.max_model_len: {name} has longrope frequencies and no original_max_position_embeddings in its "
                "config.json, so they depend on the server's max_model_len; set both to the same value"
            )
        length = default
    ROPE_INIT_FUNCTIONS[_FIXED_LONGROPE] = ROPE_INIT_FUNCTIONS["longrope"]
    for module in causal_lm.modules():
        kind = getattr(module, "rope_type", None)
        if kind == "longrope":
            module.rope_type = _FIXED_LONGROPE
            module.config = deepcopy(module.config)
            _choose_factors(module.config.rope_parameters, length)
        elif isinstance(kind, dict) and "longrope" in kind.values():  # one set of frequencies for each kind of layer
            module.config = deepcopy(module.config)
            for layer in [layer for layer, one in kind.items() if one == "longrope"]:
                kind[layer] = _FIXED_LONGROPE
                _choose_factors(module.config.rope_parameters[layer], length)


def max_dynamic_length(text: Any) -> int | None:
    """Return the longest sequence of a model with dynamic frequencies (configuration `text`), else None."""
    kinds = {parameters.get("rope_type") for parameters in rope_parameters(text)}
    return int(text.max_position_embeddings) if "dynamic" in kinds else None


def rope_parameters(text: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of the rotary embeddings: none, one set, or one for each kind of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (value for value in parameters.values() if isinstance(value, dict))


def _choose_factors(parameters: dict[str, Any], length: int) -> None:
    """Replace both sets of factors by the one that `length` selects."""
    is_long = length > parameters["original_max_position_embeddings"]
    used, other = ("long", "short") if is_long else ("short", "long")
    for value in ("factor", "mscale"):
        if f"{used}_{value}" in parameters:
            parameters[f"{other}_{value}"] = parameters[f"{used}_{value}"]
