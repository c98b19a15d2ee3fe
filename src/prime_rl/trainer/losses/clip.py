"""The clipped surrogate of PPO and GRPO, which differ in their advantages and in how tokens are weighed."""

import torch
from torch import Tensor

from prime_rl.trainer.losses.base import LossInputs, LossOutput, log_ratio, masked_advantages


def clip(inputs: LossInputs, *, eps_low: float, eps_high: float, dual_clip: float | None) -> LossOutput:
    """Per token max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A), r = exp(trainer logprob - sampler logprob).

    With `dual_clip` = c, tokens of negative advantage lose at most c |A|: min(that, -c A) where A < 0.

    PPO (arXiv:1707.06347, equation 7) as used by GRPO (arXiv:2402.03300, equation 3); separate bounds are DAPO's
    clip-higher (arXiv:2503.14476, section 3.1), the third bound is dual-clip PPO (arXiv:1912.09729).
    """
    return clipped_surrogate(
        log_ratio(inputs).exp(), masked_advantages(inputs), inputs.mask, eps_low, eps_high, dual_clip
    )


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, mask: Tensor, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> LossOutput:
    """Compute the pessimistic clipped loss of `ratio` and `advantages`, [T] each and 0 in effect outside the mask."""
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)
    negative = advantages < 0
    low = mask & negative & (ratio < 1 - eps_low)
    high = mask & (advantages > 0) & (ratio > 1 + eps_high)
    if dual_clip is not None:
        loss = torch.where(negative, torch.minimum(loss, -dual_clip * advantages), loss)
        high = high | (mask & negative & (ratio > dual_clip))
    return LossOutput.plain(loss, low, high)
