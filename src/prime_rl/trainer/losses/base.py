"""What a loss sees and answers, and the safe log-ratio that every loss starts from (I10)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# exp(20) = 4.9e8: far beyond any ratio that a loss lets through, far below what overflows.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One packed row; all tensors [T].

    Attributes:
        logprobs: the trainer's, differentiable.
        sampler_logprobs: the sampler's; anything, also non-finite, outside the mask.
        advantages: one per token.
        mask: bool, the tokens to train on.
        segment_ids: int64, equal within one sample: for losses over sequences.
    """

    logprobs: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    segment_ids: Tensor


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The answer of a loss.

    Attributes:
        loss: scalar, summed over the tokens of the mask; the engine divides by N of the whole minibatch.
        clipped: bool [T], the tokens whose gradient the loss cut off.
    """

    loss: Tensor
    clipped: Tensor


Loss = Callable[[LossInputs], LossOutput]


def log_ratio(inputs: LossInputs) -> Tensor:
    """log(trainer / sampler) per token [T], clamped so that exp is finite; 0 outside the mask.

    The mask comes before the arithmetic: what is outside may be infinite, and 0 * inf would poison the gradient.
    """
    difference = torch.where(inputs.mask, inputs.logprobs - inputs.sampler_logprobs, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
