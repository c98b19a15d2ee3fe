"""Decoupled PPO: staleness corrected by a weight, the trust region kept around where the step began."""

from prime_rl.trainer.losses.base import LossInputs, LossOutput, limited_difference, masked_advantages
from prime_rl.trainer.losses.clip import clipped_surrogate


def decoupled_ppo(inputs: LossInputs, *, eps_low: float, eps_high: float, weight_clip: float | None) -> LossOutput:
    """Per token w * max(-u A, -clip(u, 1 - eps_low, 1 + eps_high) A), u = trainer / proximal, w = proximal / sampler.

    The proximal policy is the trainer's before the first update of the step; w is at most `weight_clip`, None for no
    bound. Before the first update u is 1 and the gradient that of importance sampling with weight w.

    Hilton et al., Batch size-invariance for policy optimization (arXiv:2110.00641), the decoupled clipped
    objective; in AReaL (arXiv:2505.24298, section 5.2) for asynchronous training of language models.
    """
    proximal = inputs.logprobs.detach() if inputs.proximal_logprobs is None else inputs.proximal_logprobs
    weight = limited_difference(proximal, inputs.sampler_logprobs, inputs.mask).exp()
    ratio = limited_difference(inputs.logprobs, proximal, inputs.mask).exp()
    if weight_clip is not None:
        weight = weight.clamp(max=weight_clip)
    return clipped_surrogate(ratio, weight * masked_advantages(inputs), inputs.mask, eps_low, eps_high)
