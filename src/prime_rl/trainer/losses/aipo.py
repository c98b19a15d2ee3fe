"""AIPO: importance sampling per token, the ratio clipped from above."""

from prime_rl.trainer.losses.base import LossInputs, LossOutput, log_ratio, masked_advantages


def aipo(inputs: LossInputs, *, ratio_clip: float) -> LossOutput:
    """Per token -min(r, c) * A, r = exp(trainer logprob - sampler logprob), c = `ratio_clip`.

    Where r exceeds c the gradient is zero. Asynchronous importance weighted policy optimisation of LlamaRL
    (arXiv:2505.24034), token by token and without its KL and entropy terms.
    """
    ratio = log_ratio(inputs).exp()
    return LossOutput.plain(
        -ratio.clamp(max=ratio_clip) * masked_advantages(inputs), high=inputs.mask & (ratio > ratio_clip)
    )
