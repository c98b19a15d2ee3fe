"""Log-probabilities and entropies of given tokens without ever holding the full logits.

At most `chunk x vocabulary` logits exist at a time, in the forward pass and in the backward pass, which computes them
again. Sums and softmaxes are in float32 whatever the dtype of the weights.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Score tokens under softmax(hidden @ weight.T / temperature).

    Args:
        hidden: [N, H], the states that predict the tokens; N may be 0.
        weight: [V, H], the output embedding.
        targets: int64 [N], the tokens.
        temperature: float32 [N], positive.
        chunk: tokens whose logits exist at the same time.

    Returns:
        logprobs float32 [N], differentiable in `hidden` and `weight`; entropy float32 [N] in nats, without gradient.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, chunk)


class _TokenLogprobs(torch.autograd.Function):
    """d logprob / d logits = (onehot - softmax) / temperature."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            logits = _logits(hidden[part], weight, temperature[part])
            lse = torch.logsumexp(logits, -1)
            normaliser[part] = lse
            everything = logits.sub_(lse[:, None])
            logprobs[part] = everything.gather(-1, targets[part, None]).squeeze(-1)
            entropy[part] = -everything.exp().mul_(everything).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, temperature, normaliser)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, weight, targets, temperature, normaliser = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for begin in range(0, len(hidden), ctx.chunk):
            part = slice(begin, begin + ctx.chunk)
            scale = (grad[part] / temperature[part])[:, None]
            logits = _logits(hidden[part], weight, temperature[part])
            slope = logits.sub_(normaliser[part, None]).exp_().mul_(-scale)
            slope = slope.scatter_add_(1, targets[part, None], scale).to(hidden.dtype)
            grad_hidden[part] = slope @ weight
            if grad_weight is not None:
                _add_product(grad_weight, slope, hidden[part])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    return (hidden @ weight.t()).float().div_(temperature[:, None])


def _add_product(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    """total += slope.T @ hidden, accumulated in float32 across chunks."""
    if hidden.dtype == total.dtype:
        total.addmm_(slope.t(), hidden)
    else:
        total += slope.t() @ hidden
