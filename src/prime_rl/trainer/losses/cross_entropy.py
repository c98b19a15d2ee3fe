"""Cross-entropy: the loss of supervised fine-tuning."""

import torch

from prime_rl.trainer.losses.base import LossInputs, LossOutput


def cross_entropy(inputs: LossInputs) -> LossOutput:
    """Sum of -logprob over the mask. Advantages and the sampler's logprobs play no part."""
    return LossOutput(-torch.where(inputs.mask, inputs.logprobs, 0.0).sum(), torch.zeros_like(inputs.mask))
