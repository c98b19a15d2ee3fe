"""Losses in addition to the policy gradient: cross-entropy, a KL penalty to a reference model, and distillation."""

import torch
from torch import Tensor

from prime_rl.trainer.losses.loss_inputs import clamped_difference, finite


def cross_entropy(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Per token [T] -logprob, 0 outside the mask (bool [T])."""
    return torch.where(mask, -finite(logprobs), 0.0)


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: str, straight_through: bool) -> Tensor:
    """Estimate KL(trainer || reference) per token [T], 0 outside the mask.

    With q = log(trainer / reference) of the token: k1 = q, k2 = q^2 / 2, k3 = exp(-q) - 1 + q
    (Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html). With `straight_through` the
    gradient is that of k2, whose expectation on policy is the gradient of the KL. (For k1 it is 0, for k3 the gradient
    of KL(reference || trainer).)
    """
    q = clamped_difference(logprobs, ref_logprobs, mask)
    k2 = q.square() / 2
    value = {"k1": q, "k2": k2, "k3": torch.expm1(-q) + q}[estimator]
    return value.detach() + k2 - k2.detach() if straight_through else value


def distillation(
    logprobs: Tensor, sampler_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, ratio_clip: float
) -> Tensor:
    """Reverse KL to a teacher on the policy's own samples, per token [T], 0 outside the mask.

    Value min(r, c) * q with q = log(trainer / teacher), r = trainer / sampler and c = `ratio_clip`. The gradient,
    min(r, c) * q * grad logprob, is the policy gradient with reward -q.

    On-policy distillation: GKD (arXiv:2306.13649, with lambda = 1 and the reverse KL).
    """
    q = clamped_difference(logprobs, ref_logprobs, mask).detach()
    ratio = clamped_difference(logprobs, sampler_logprobs, mask).detach().exp().clamp(max=ratio_clip)
    trained = torch.where(mask, finite(logprobs), 0.0)
    return ratio * q * (1 + trained - trained.detach())
