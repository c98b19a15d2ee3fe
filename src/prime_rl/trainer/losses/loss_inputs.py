"""Inputs and outputs of a loss, token weights, and numerically safe helpers for losses.

Log-ratios are clamped before exp, and masks are applied by `where`, because 0 * inf is NaN in the gradient (I10).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from prime_rl.trainer.train_step import Counts

Normalization = Literal["token", "sequence", "fixed"]

# exp(20) = 4.9e8: above every bound on a ratio, far below overflow.
MAX_LOG_RATIO = 20.0
# Replaces minus infinity in differences and products; below every log-probability that occurs.
_LOWEST = -1e4


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One packed row; all tensors [T]."""

    logprobs: Tensor  # the trainer's, differentiable
    sampler_logprobs: Tensor  # the sampler's; may be non-finite outside the mask
    advantages: Tensor  # one per token
    mask: Tensor  # bool, the tokens to train on
    segment_ids: Tensor  # int64, equal within one sample: for losses over sequences
    # the trainer's before the first update of the step, without gradient; None before that update
    proximal_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None  # a reference model's, without gradient; None without a reference model


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Output of a loss; all tensors [T]."""

    loss: Tensor  # of each token, differentiable, 0 outside the mask. The objective weighs and sums them.
    low: Tensor  # bool, tokens without gradient because their ratio is too low
    high: Tensor  # bool, tokens without gradient because their ratio is too high
    masked: Tensor  # bool, tokens that the loss omits

    @classmethod
    def unmasked(cls, loss: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> "LossOutput":
        """Build the output of a loss that omits no tokens; omitted masks default to all-False."""
        none = torch.zeros_like(loss, dtype=torch.bool)
        return cls(loss, none if low is None else low, none if high is None else high, none)


Loss = Callable[[LossInputs], LossOutput]


def log_ratio(inputs: LossInputs) -> Tensor:
    """log(trainer / sampler) per token [T], clamped so that exp is finite; 0 outside the mask."""
    return clamped_difference(inputs.logprobs, inputs.sampler_logprobs, inputs.mask)


def clamped_difference(one: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """one - other [T], within +-MAX_LOG_RATIO; 0 outside the mask, and where both are minus infinity."""
    difference = torch.where(mask, finite(one) - finite(other), 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def finite(logprobs: Tensor) -> Tensor:
    """Clamp infinities. NaN stays NaN, so that the step is skipped and counted (I10)."""
    return logprobs.clamp(_LOWEST, -_LOWEST)


def masked_advantages(inputs: LossInputs) -> Tensor:
    """Advantages [T], 0 outside the mask."""
    return torch.where(inputs.mask, inputs.advantages, 0.0)


def masked_logprobs(inputs: LossInputs) -> Tensor:
    """The trainer's log-probabilities [T], finite, 0 outside the mask."""
    return torch.where(inputs.mask, finite(inputs.logprobs), 0.0)


def sequence_sum(values: Tensor, segment_ids: Tensor) -> Tensor:
    """Return for every token [T] the sum of `values` over its segment."""
    # One slot per token: reading the number of segments would synchronise with the device.
    return torch.zeros_like(values).index_add(0, segment_ids, values)[segment_ids]


def sequence_lengths(mask: Tensor, segment_ids: Tensor) -> Tensor:
    """Return for every token [T] the number of masked-in tokens of its segment, at least 1; float32."""
    return sequence_sum(mask.float(), segment_ids).clamp(min=1.0)


def sequence_mean(values: Tensor, mask: Tensor, segment_ids: Tensor) -> Tensor:
    """Return for every token [T] the mean of `values` over the mask's tokens of its segment."""
    return sequence_sum(torch.where(mask, values, 0.0), segment_ids) / sequence_lengths(mask, segment_ids)


def token_weights(
    mask: Tensor, segment_ids: Tensor, counts: Counts, normalization: Normalization, fixed_length: int
) -> Tensor:
    """Return the weight of each token of a row [T]; the sum over a minibatch on all ranks is at most 1 (I9).

    - token: 1 / N, N the trained tokens of the minibatch: the mean over tokens.
    - sequence: 1 / (S n_s), n_s the trained tokens of the token's sequence, S the sequences of the minibatch: the mean
      over sequences of their means.
    - fixed: 1 / (S L), L = `fixed_length`: sums of sequences over a constant, independent of their lengths.

    `mask` [T] are the trained tokens, before any mask that a loss adds; `counts` are N and S, over all ranks.
    """
    if normalization == "token":
        weight: Tensor | float = 1 / counts.tokens
    elif normalization == "sequence":
        weight = 1 / (counts.sequences * sequence_lengths(mask, segment_ids))
    else:
        weight = 1 / (counts.sequences * fixed_length)
    return torch.where(mask, weight, 0.0)
