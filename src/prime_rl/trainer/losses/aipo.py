"""AIPO: importance sampling per token, the ratio clipped from above."""

import torch

from prime_rl.trainer.losses.base import LossInputs, LossOutput, log_ratio


def aipo(inputs: LossInputs, *, ratio_clip: float) -> LossOutput:
    """Sum of -min(r, c) * A over the mask, r = exp(trainer logprob - sampler logprob), c = `ratio_clip`.

    Where r exceeds c the gradient is zero. Asynchronous importance weighted policy optimisation of LlamaRL
    (arXiv:2505.24034), token by token and without its KL and entropy terms.
    """
    ratio = log_ratio(inputs).exp()
    advantages = torch.where(inputs.mask, inputs.advantages, 0.0)
    return LossOutput(-(ratio.clamp(max=ratio_clip) * advantages).sum(), inputs.mask & (ratio > ratio_clip))
