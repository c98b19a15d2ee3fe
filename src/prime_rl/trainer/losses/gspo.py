"""GSPO: one importance ratio for the whole sequence, clipped as in PPO."""

from prime_rl.trainer.losses.base import LossInputs, LossOutput, log_ratio, masked_advantages, sequence_mean
from prime_rl.trainer.losses.clip import clipped_surrogate


def gspo(inputs: LossInputs, *, eps_low: float, eps_high: float) -> LossOutput:
    """Per token max(-s_t A, -clip(s_t, 1 - eps_low, 1 + eps_high) A), where s_t has the value of the sequence's ratio.

    s = exp(mean over the sequence's trained tokens of (trainer logprob - sampler logprob)), and
    s_t = sg(s) * exp(log r_t - sg(log r_t)) with r_t the token's ratio and sg the stopped gradient. With one advantage
    for all tokens of a sequence and sequence normalisation, value and gradient are those of the sequence-level
    objective; advantages may also differ by token.

    Group sequence policy optimisation (arXiv:2507.18071); s_t is its GSPO-token.
    """
    token = log_ratio(inputs)
    sequence = sequence_mean(token, inputs.mask, inputs.segment_ids).detach()
    ratio = (sequence + token - token.detach()).exp()
    return clipped_surrogate(ratio, masked_advantages(inputs), inputs.mask, eps_low, eps_high)
