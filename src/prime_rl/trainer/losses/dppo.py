"""DPPO: tokens whose probability has moved too far are left out, whatever their ratio."""

import torch

from prime_rl.trainer.losses.base import LossInputs, LossOutput, log_ratio, masked_advantages


def dppo(
    inputs: LossInputs, *, dppo_mask_low: float, dppo_mask_high: float, adv_tau: float, kl_tau: float
) -> LossOutput:
    """Per token -keep * adv_tau * A * r + kl_tau * (trainer logprob - sampler logprob)^2.

    d = trainer probability - sampler probability. Left out of the first term are tokens with A > 0 and
    d > `dppo_mask_high`, or A <= 0 and d < -`dppo_mask_low`; the second holds all of them. r is not clipped.

    Divergence PPO with the binary total variation (arXiv:2602.04879); the squared log-ratio is the
    regulariser of Kimi k1.5 (arXiv:2501.12599, section 2.3.2).
    """
    difference = log_ratio(inputs)
    moved = _probability(inputs.logprobs) - _probability(inputs.sampler_logprobs)
    advantages = masked_advantages(inputs)
    high = inputs.mask & (advantages > 0) & (moved > dppo_mask_high)
    low = inputs.mask & (advantages <= 0) & (moved < -dppo_mask_low)
    kept = torch.where(low | high, 0.0, difference.exp() * advantages)
    return LossOutput(-adv_tau * kept + kl_tau * difference.square(), low, high, low | high)


def _probability(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.detach().clamp(max=0.0).exp()
