"""REINFORCE: the plain policy gradient, and the same with truncated importance weights."""

from prime_rl.trainer.losses.base import LossInputs, LossOutput, log_ratio, masked_advantages, masked_logprobs


def reinforce(inputs: LossInputs) -> LossOutput:
    """Per token -A * logprob, as if the tokens came from the policy that is trained. No ratio: biased where not.

    Williams 1992 (doi:10.1007/BF00992696).
    """
    return LossOutput.plain(-masked_advantages(inputs) * masked_logprobs(inputs))


def tis(inputs: LossInputs, *, ratio_clip: float) -> LossOutput:
    """Per token -sg(min(r, c)) * A * logprob, r = trainer / sampler, c = `ratio_clip`, sg the stopped gradient.

    Truncated importance sampling (Ionides 2008, doi:10.1198/106186008X320456), as the rho of V-trace in IMPALA
    (arXiv:1802.01561, equation 1); for language models Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training", whose form with a PPO ratio is `decoupled_ppo` with a `weight_clip`.
    """
    ratio = log_ratio(inputs).exp().detach()
    loss = -ratio.clamp(max=ratio_clip) * masked_advantages(inputs) * masked_logprobs(inputs)
    return LossOutput.plain(loss, high=inputs.mask & (ratio > ratio_clip))
