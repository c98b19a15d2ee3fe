"""CISPO: the importance ratio as a clipped weight without gradient; no token is left out."""

from prime_rl.trainer.losses.base import LossInputs, LossOutput, log_ratio, masked_advantages, masked_logprobs


def cispo(inputs: LossInputs, *, eps_low: float | None, eps_high: float) -> LossOutput:
    """Per token -sg(clip(r, 1 - eps_low, 1 + eps_high)) * A * logprob, sg the stopped gradient.

    `eps_low` None sets no lower bound, as the paper's authors train. Clipped IS-weight policy optimisation of
    MiniMax-M1 (arXiv:2506.13585), equations 4 and 5.
    """
    ratio = log_ratio(inputs).exp().detach()
    floor = 0.0 if eps_low is None else 1 - eps_low
    loss = -ratio.clamp(floor, 1 + eps_high) * masked_advantages(inputs) * masked_logprobs(inputs)
    return LossOutput.plain(loss, inputs.mask & (ratio < floor), inputs.mask & (ratio > 1 + eps_high))
