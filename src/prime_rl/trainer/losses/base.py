"""What a loss sees and answers, and the safe arithmetic that every loss starts from.

I10 finite: log-ratios are limited before exp, and masks are applied by `where`, because 0 * inf would poison the
gradient. I8: a sum over a sequence sees only the tokens of its segment, wherever in a row that lies.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# exp(20) = 4.9e8: far beyond any ratio that a loss lets through, far below what overflows.
MAX_LOG_RATIO = 20.0
# Below every log-probability that occurs; stands for minus infinity where a difference or a product is taken.
_LOWEST = -1e4


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One packed row; all tensors [T].

    Attributes:
        logprobs: the trainer's, differentiable.
        sampler_logprobs: the sampler's; anything, also non-finite, outside the mask.
        advantages: one per token.
        mask: bool, the tokens to train on.
        segment_ids: int64, equal within one sample: for losses over sequences.
        proximal_logprobs: the trainer's before the first update of the step, without gradient; None where that is now.
        ref_logprobs: a reference model's, without gradient; None where there is none.
    """

    logprobs: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    segment_ids: Tensor
    proximal_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The answer of a loss; all tensors [T].

    Attributes:
        loss: of each token, differentiable, 0 outside the mask. The objective weighs and sums them.
        low: bool, tokens whose gradient was cut off because their ratio is too low.
        high: bool, the same for too high.
        masked: bool, tokens that a mask of the loss left out altogether.
    """

    loss: Tensor
    low: Tensor
    high: Tensor
    masked: Tensor

    @classmethod
    def plain(cls, loss: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> "LossOutput":
        """Make the answer of a loss without a mask of its own; what is not given is nowhere."""
        none = torch.zeros_like(loss, dtype=torch.bool)
        return cls(loss, none if low is None else low, none if high is None else high, none)


Loss = Callable[[LossInputs], LossOutput]


def log_ratio(inputs: LossInputs) -> Tensor:
    """log(trainer / sampler) per token [T], limited so that exp is finite; 0 outside the mask."""
    return limited_difference(inputs.logprobs, inputs.sampler_logprobs, inputs.mask)


def limited_difference(one: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """one - other [T], within +-MAX_LOG_RATIO; 0 outside the mask, and where both are minus infinity."""
    difference = torch.where(mask, finite(one) - finite(other), 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def finite(logprobs: Tensor) -> Tensor:
    """Replace infinities by the limits of log-probabilities. NaN stays, so that the step is skipped and counted."""
    return logprobs.clamp(_LOWEST, -_LOWEST)


def masked_advantages(inputs: LossInputs) -> Tensor:
    """Advantages [T], 0 outside the mask."""
    return torch.where(inputs.mask, inputs.advantages, 0.0)


def masked_logprobs(inputs: LossInputs) -> Tensor:
    """The trainer's log-probabilities [T], finite, 0 outside the mask."""
    return torch.where(inputs.mask, finite(inputs.logprobs), 0.0)


def sequence_sum(values: Tensor, segment_ids: Tensor) -> Tensor:
    """Give every token [T] the sum of `values` over its segment."""
    # As many slots as tokens: how many segments there are is not asked for, which would wait for the device.
    return torch.zeros_like(values).index_add(0, segment_ids, values)[segment_ids]


def sequence_lengths(mask: Tensor, segment_ids: Tensor) -> Tensor:
    """Give every token [T] how many tokens of its segment are in the mask, at least 1; float32."""
    return sequence_sum(mask.float(), segment_ids).clamp(min=1.0)


def sequence_mean(values: Tensor, mask: Tensor, segment_ids: Tensor) -> Tensor:
    """Give every token [T] the mean of `values` over the mask's tokens of its segment."""
    return sequence_sum(torch.where(mask, values, 0.0), segment_ids) / sequence_lengths(mask, segment_ids)
