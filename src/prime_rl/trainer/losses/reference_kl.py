"""How far the policy is from a reference model: a penalty beside any loss, and distillation of a teacher."""

import torch
from torch import Tensor

from prime_rl.trainer.losses.base import finite, limited_difference


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: str, straight_through: bool) -> Tensor:
    """Estimate KL(trainer || reference) per token [T], 0 outside the mask.

    With q = log(trainer / reference) of the token: k1 = q, k2 = q^2 / 2, k3 = exp(-q) - 1 + q
    (Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html).

    Args:
        logprobs: [T], the trainer's, differentiable.
        ref_logprobs: [T].
        mask: bool [T].
        estimator: "k1", "k2" or "k3".
        straight_through: give the estimate the gradient of k2, which on policy is in expectation that of the KL itself.
            (That of k1 is 0, that of k3 the gradient of KL(reference || trainer).)
    """
    q = limited_difference(logprobs, ref_logprobs, mask)
    k2 = q.square() / 2
    value = {"k1": q, "k2": k2, "k3": torch.expm1(-q) + q}[estimator]
    return value.detach() + k2 - k2.detach() if straight_through else value


def distillation(
    logprobs: Tensor, sampler_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, ratio_clip: float
) -> Tensor:
    """Reverse KL to a teacher on the policy's own samples, per token [T], 0 outside the mask.

    Value min(r, c) * q with q = log(trainer / teacher), r = trainer / sampler and c = `ratio_clip`; gradient
    min(r, c) * q * grad logprob, which is the policy gradient whose reward is -q.

    On-policy distillation: GKD (arXiv:2306.13649, with lambda = 1 and the reverse KL).
    """
    q = limited_difference(logprobs, ref_logprobs, mask).detach()
    ratio = limited_difference(logprobs, sampler_logprobs, mask).detach().exp().clamp(max=ratio_clip)
    trained = torch.where(mask, finite(logprobs), 0.0)
    return ratio * q * (1 + trained - trained.detach())
