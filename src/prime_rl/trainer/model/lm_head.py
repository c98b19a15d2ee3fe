"""Log-probabilities and entropies of given tokens without the full logits in memory.

At most `chunk x vocabulary` logits exist at a time (four times that where nothing is compiled). The forward pass
iterates over the tokens, because a softmax needs the whole vocabulary. The backward pass recomputes the logits and
iterates over the vocabulary, so each part of the weight's gradient is one product and needs no copy in float32.

Logits, sums and softmaxes are in float32 for any dtype of the weights: bfloat16 would round a logit of 20, and with it
the log-probability, by up to 0.06.
"""

import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prime_rl.trainer.model.sampling_mask import SamplingMask, kept_threshold

_LOGITS = 2**24
"""Default number of logits in memory on a CPU: 64 MiB in float32."""
_LOGITS_CUDA = 2**28
"""Default on CUDA: 1 GiB. The whole weight is read for every chunk, so small chunks are memory bound."""
_TILE = 128
"""Chunks on CUDA are multiples of the tile size of matrix products."""
_STRIPE = 64
"""Blocks of the vocabulary are multiples of this, which matrix products require for speed."""
_COPIED = 4096
"""Rows of the output embedding that a CPU converts to float32 at a time."""
_MASKED = -1e30
"""Logit of a masked token. It is finite, so that probability times log-probability is 0 and not NaN."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    chunk: int | None = None,
    mask: SamplingMask | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Score tokens under softmax(hidden @ weight.T / temperature), with the sampler's top-k, top-p and min-p.

    With a softcap, softcap * tanh(logits / softcap) replaces the logits, before temperature and sampling mask.

    With a sampling mask, log-probability and entropy are those of the renormalised remaining distribution: the tokens
    that these logits keep, and the target itself, which the sampler kept. The mask is constant in the gradient.

    Args:
        hidden: [N, H], the states that predict the tokens; N may be 0.
        weight: [V, H], the output embedding.
        targets: int64 [N], the tokens.
        temperature: float32 [N], positive.
        chunk: number of tokens whose logits are in memory at a time; None: `default_chunk`.
        mask: sampling mask of the N tokens, or None.
        softcap: limit of the absolute value of the logits, positive; None for none.

    Returns:
        logprobs float32 [N], differentiable in `hidden` and `weight`; entropy float32 [N] in nats, without gradient;
        masked bool [N], the targets that these logits alone would have masked.
    """
    chunk = chunk or default_chunk(len(weight), hidden.is_cuda)
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, chunk, mask, softcap)


def default_chunk(vocabulary: int, cuda: bool) -> int:
    """Return the number of tokens whose logits are in memory at a time."""
    if cuda:
        return max(_TILE, _LOGITS_CUDA // vocabulary // _TILE * _TILE)
    return max(1, _LOGITS // vocabulary)


class _TokenLogprobs(torch.autograd.Function):
    """d logprob / d logits = (onehot - softmax) / temperature, times 1 - (capped / softcap)^2 for capped logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        chunk: int,
        mask: SamplingMask | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = len(hidden)
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropy, log_normalizer = torch.empty_like(logprobs), torch.empty_like(logprobs)
        masked = torch.zeros_like(logprobs, dtype=torch.bool)
        threshold = None if mask is None else torch.empty_like(logprobs)
        buffer = logprobs.new_empty(min(chunk, count), len(weight))
        score = _compile(_score) if hidden.is_cuda else _score
        cap = _compile(_cap) if hidden.is_cuda else _cap
        for begin in range(0, count, chunk):
            part = slice(begin, begin + chunk)
            logits = buffer[: len(hidden[part])]
            _multiply(hidden[part], weight, logits)
            if softcap is not None:
                cap(logits, softcap)
            divisor: Tensor | None = temperature[part]
            chosen = logits.gather(1, targets[part, None]).div_(temperature[part, None])
            if mask is not None and threshold is not None:
                logits.div_(temperature[part, None])
                divisor = None
                threshold[part] = kept_threshold(logits, mask[part])
                masked[part] = chosen[:, 0] < threshold[part]
                logits.masked_fill_(logits < threshold[part, None], _MASKED).scatter_(1, targets[part, None], chosen)
            logprobs[part], entropy[part] = score(logits, targets[part], divisor)
            log_normalizer[part] = chosen[:, 0] - logprobs[part]
        ctx.save_for_backward(hidden, weight, targets, temperature, logprobs, log_normalizer, threshold)
        ctx.chunk, ctx.softcap = chunk, softcap
        ctx.mark_non_differentiable(entropy, masked)
        return logprobs, entropy, masked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, logprobs, log_normalizer, threshold = ctx.saved_tensors
        count, vocabulary = len(hidden), len(weight)
        scale = grad / temperature
        at_target = scale * -torch.expm1(logprobs)
        if ctx.softcap is not None:
            at_target *= 1 - ((logprobs + log_normalizer) * temperature / ctx.softcap) ** 2
        width = vocabulary if count <= ctx.chunk else max(_STRIPE, ctx.chunk * vocabulary // count // _STRIPE * _STRIPE)
        buffer = grad.new_empty(count * width)
        slope_of = _compile(_slope) if hidden.is_cuda else _slope
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for begin in range(0, vocabulary, width):
            block = slice(begin, min(begin + width, vocabulary))
            logits = buffer[: count * (block.stop - begin)].view(count, block.stop - begin)
            _multiply(hidden, weight[block], logits)
            slope = slope_of(logits, temperature, log_normalizer, threshold, scale, ctx.softcap, hidden.dtype)
            slope = _set_targets(slope, targets - begin, at_target.to(hidden.dtype))
            _add_product(grad_hidden, slope, weight[block])
            if grad_weight is not None:
                torch.mm(slope.t(), hidden, out=grad_weight[block])
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None


def _cap(logits: Tensor, softcap: float) -> None:
    """Replace logits by softcap * tanh(logits / softcap)."""
    logits.div_(softcap).tanh_().mul_(softcap)


def _score(logits: Tensor, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return logprobs [n] and entropies [n] of logits [n, V]; `temperature` is None if it is applied already."""
    logprobs = torch.log_softmax(logits if temperature is None else logits / temperature[:, None], -1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def _slope(
    logits: Tensor,
    temperature: Tensor,
    log_normalizer: Tensor,
    threshold: Tensor | None,
    scale: Tensor,
    softcap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return -scale * softmax of a block of the vocabulary, times the derivative of the softcap."""
    derivative: Tensor | float = 1.0
    if softcap is not None:
        ratio = torch.tanh(logits / softcap)
        logits, derivative = ratio * softcap, 1 - ratio**2
    logits = logits / temperature[:, None]
    if threshold is not None:
        logits = torch.where(logits < threshold[:, None], _MASKED, logits)
    return ((logits - log_normalizer[:, None]).exp() * -scale[:, None] * derivative).to(dtype)


def _set_targets(slope: Tensor, targets: Tensor, values: Tensor) -> Tensor:
    """Write `values` [N] at the columns `targets` [N] of `slope` [N, v]; columns outside are ignored."""
    column = targets.clamp(0, slope.shape[1] - 1)
    values = torch.where(column == targets, values, slope.gather(1, column[:, None])[:, 0])
    return slope.scatter_(1, column[:, None], values[:, None])


def _multiply(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """Compute out = hidden @ weight.T in float32 for any dtype of the factors."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    else:  # on a CPU the product of half-precision factors is rounded
        hidden = hidden.float()
        copy = torch.empty(min(len(weight), _COPIED), weight.shape[1])
        for begin in range(0, len(weight), _COPIED):
            part = weight[begin : begin + _COPIED]
            torch.mm(hidden, copy[: len(part)].copy_(part).t(), out=out[:, begin : begin + _COPIED])


def _add_product(total: Tensor, slope: Tensor, weight: Tensor) -> None:
    """Compute total += slope @ weight in float32."""
    if slope.dtype == total.dtype:
        total.addmm_(slope, weight)
    elif slope.is_cuda:
        total += torch.mm(slope, weight, out_dtype=total.dtype)
    else:
        total += slope @ weight


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` to one kernel if there is a C compiler, which triton requires at run time."""
    compiler = any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang"))
    return torch.compile(function) if compiler else function
