"""Log-probabilities and entropies of given tokens without ever holding the full logits.

At most `chunk x vocabulary` logits exist at a time (twice that in the forward pass), and nothing else that grows with
tokens x vocabulary. The forward pass goes over the tokens, since the whole vocabulary is needed for a sum and for a
cut; the backward pass computes the logits again and goes over the vocabulary, so that each part of the weight's
gradient is one product, finished at once, and needs no copy in float32.

Logits, sums and softmaxes are in float32 whatever the dtype of the weights: bfloat16 would round a logit of 20 by up
to 0.06, and a log-probability with it.
"""

import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prime_rl.trainer.truncation import Truncation, lowest_kept

_LOGITS = 2**26
"""Logits that exist at the same time where `chunk` is not given: 256 MiB in float32."""
_STRIPE = 64
"""Blocks of the vocabulary are multiples of it, as the kernels of matrix products like them."""
_COPIED = 4096
"""Rows of the output embedding that a CPU copies to float32 at the same time."""
_CUT = -1e30
"""Logit of a token that was cut: its probability is 0, and 0 times its log-probability is 0 and not NaN."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    chunk: int | None = None,
    truncation: Truncation | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Score tokens under softmax(hidden @ weight.T / temperature), cut as the sampler cut it.

    Where a distribution was cut, log-probability and entropy are those of what is left, scaled to sum to 1. What is
    left is what these logits keep, and the token itself: the sampler kept it. The cut is a constant of the gradient.

    Args:
        hidden: [N, H], the states that predict the tokens; N may be 0.
        weight: [V, H], the output embedding.
        targets: int64 [N], the tokens.
        temperature: float32 [N], positive.
        chunk: tokens whose logits exist at the same time; None: as many as 256 MiB hold.
        truncation: of N tokens; None cuts nothing.

    Returns:
        logprobs float32 [N], differentiable in `hidden` and `weight`; entropy float32 [N] in nats, without gradient;
        left_out bool [N], the tokens that these logits alone would not have kept.
    """
    chunk = chunk or max(1, _LOGITS // len(weight))
    logprobs, entropy, left_out = _TokenLogprobs.apply(hidden, weight, targets, temperature, chunk, truncation)
    return logprobs, entropy, left_out


class _TokenLogprobs(torch.autograd.Function):
    """d logprob / d logits = (onehot - softmax) / temperature."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        chunk: int,
        truncation: Truncation | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = len(hidden)
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropy, normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        left_out = torch.zeros_like(logprobs, dtype=torch.bool)
        lowest = None if truncation is None else torch.empty_like(logprobs)
        room = logprobs.new_empty(1 if hidden.is_cuda else 2, min(chunk, count), len(weight))
        score = _score_compiled() if hidden.is_cuda else _score
        for begin in range(0, count, chunk):
            part = slice(begin, begin + chunk)
            logits, spare = room[0, : len(hidden[part])], room[-1, : len(hidden[part])]
            _multiply(hidden[part], weight, logits)
            logits.div_(temperature[part, None])
            chosen = logits.gather(1, targets[part, None])
            if truncation is not None and lowest is not None:
                lowest[part] = lowest_kept(logits, truncation[part])
                left_out[part] = chosen[:, 0] < lowest[part]
                logits.masked_fill_(logits < lowest[part, None], _CUT).scatter_(1, targets[part, None], chosen)
            logprobs[part], entropy[part] = score(logits, spare, targets[part])
            normaliser[part] = chosen[:, 0] - logprobs[part]
        ctx.save_for_backward(hidden, weight, targets, temperature, logprobs, normaliser, lowest)
        ctx.chunk = chunk
        # One chunk: the backward pass follows at once and takes the probabilities instead of computing them again.
        ctx.probabilities = room[1] if count <= chunk and not hidden.is_cuda else None
        ctx.mark_non_differentiable(entropy, left_out)
        return logprobs, entropy, left_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, logprobs, normaliser, lowest = ctx.saved_tensors
        probabilities, ctx.probabilities = ctx.probabilities, None
        count, vocabulary = len(hidden), len(weight)
        scale = grad / temperature
        at_target = scale * -torch.expm1(logprobs)
        width = vocabulary if count <= ctx.chunk else max(_STRIPE, ctx.chunk * vocabulary // count // _STRIPE * _STRIPE)
        room = None if probabilities is not None else grad.new_empty(count * width)
        slope_of = _slope_compiled() if hidden.is_cuda else _slope
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for begin in range(0, vocabulary, width):
            block = slice(begin, min(begin + width, vocabulary))
            if room is None:
                slope = probabilities.mul_(-scale[:, None])
            else:
                logits = room[: count * (block.stop - begin)].view(count, -1)
                _multiply(hidden, weight[block], logits)
                slope = slope_of(logits, temperature, normaliser, lowest, scale)
            slope = _set_targets(slope, targets - begin, at_target).to(hidden.dtype)
            _add_product(grad_hidden, slope, weight[block])
            if grad_weight is not None:
                torch.mm(slope.t(), hidden, out=grad_weight[block])
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None


def _score(logits: Tensor, spare: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return logprobs [n] and entropies [n]; overwrites the logits, and leaves the probabilities in `spare`."""
    # In place and into memory that is there already: fresh memory costs a CPU three times what the arithmetic does.
    everything = torch.log_softmax(logits, -1, out=logits)
    logprobs = everything.gather(1, targets[:, None])[:, 0]
    torch.exp(everything, out=spare)
    return logprobs, everything.mul_(spare).sum(-1).neg_()


def _score_functional(logits: Tensor, spare: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same for a compiler, which makes one kernel of it that writes no logits."""
    everything = torch.log_softmax(logits, -1)
    return everything.gather(1, targets[:, None])[:, 0], -(everything.exp() * everything).sum(-1)


def _slope(logits: Tensor, temperature: Tensor, normaliser: Tensor, lowest: Tensor | None, scale: Tensor) -> Tensor:
    """Return -scale * softmax of a block of the vocabulary, in place of its logits."""
    logits.div_(temperature[:, None])
    if lowest is not None:
        logits.masked_fill_(logits < lowest[:, None], _CUT)
    return logits.sub_(normaliser[:, None]).exp_().mul_(-scale[:, None])


def _slope_functional(
    logits: Tensor, temperature: Tensor, normaliser: Tensor, lowest: Tensor | None, scale: Tensor
) -> Tensor:
    logits = logits / temperature[:, None]
    if lowest is not None:
        logits = torch.where(logits < lowest[:, None], _CUT, logits)
    return (logits - normaliser[:, None]).exp() * -scale[:, None]


def _set_targets(slope: Tensor, targets: Tensor, values: Tensor) -> Tensor:
    """Write `values` [N] at the columns `targets` [N] of `slope` [N, v], where there is such a column."""
    column = targets.clamp(0, slope.shape[1] - 1)
    values = torch.where(column == targets, values, slope.gather(1, column[:, None])[:, 0])
    return slope.scatter_(1, column[:, None], values[:, None])


def _multiply(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = hidden @ weight.T, in float32 whatever the dtype of the factors."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    else:  # the CPU's product of halves is a half
        hidden = hidden.float()
        copy = torch.empty(min(len(weight), _COPIED), weight.shape[1])
        for begin in range(0, len(weight), _COPIED):
            part = weight[begin : begin + _COPIED]
            torch.mm(hidden, copy[: len(part)].copy_(part).t(), out=out[:, begin : begin + _COPIED])


def _add_product(total: Tensor, slope: Tensor, weight: Tensor) -> None:
    """total += slope @ weight, `total` in float32."""
    if slope.dtype == total.dtype:
        total.addmm_(slope, weight)
    elif slope.is_cuda:
        total += torch.mm(slope, weight, out_dtype=total.dtype)
    else:
        total += slope @ weight


@cache
def _score_compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return _compile(_score_functional)


@cache
def _slope_compiled() -> Callable[..., Tensor]:
    return _compile(_slope_functional)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile where that can be done: triton needs a C compiler at run time. Otherwise each operation is a kernel."""
    compiler = any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang"))
    compiled: Callable[..., Any] = torch.compile(function) if compiler else function
    return compiled
