"""IcePop: tokens and sequences on which trainer and sampler disagree too much are left out, not clipped."""

import torch
from torch import Tensor

from prime_rl.errors import RunError
from prime_rl.trainer.losses.base import (
    LossInputs,
    LossOutput,
    limited_difference,
    log_ratio,
    masked_advantages,
    masked_logprobs,
    sequence_mean,
    sequence_sum,
)


def icepop(
    inputs: LossInputs,
    *,
    ratio_type: str,
    token_mask_low: float,
    token_mask_high: float,
    geo_mask_low: float,
    geo_mask_high: float,
    sequence_mask_low: float,
    sequence_mask_high: float,
    sequence_clip_high: float,
    adv_tau: float,
    kl_tau: float,
    teacher_tau: float,
) -> LossOutput:
    """Per token -keep * sg(rho * (A' - kl_tau * log r)) * logprob, sg the stopped gradient.

    r is the token's ratio trainer / sampler, geo the geometric mean of r over the sequence's trained tokens. A token is
    kept if r is within the token bounds, geo within the geo bounds, and the least and the greatest r of its sequence
    within the sequence bounds. rho is r, or for `ratio_type` "sequence" the product of r over the sequence, at most
    `sequence_clip_high`. A' = adv_tau * A + teacher_tau * (reference logprob - trainer logprob).

    IcePop (arXiv:2510.18855) masks by token; the masks by sequence and the terms in A' are additions.
    """
    difference = log_ratio(inputs).detach()
    ratio, mask = difference.exp(), inputs.mask
    geo = sequence_mean(difference, mask, inputs.segment_ids).exp()
    least, greatest = _extremes(ratio, mask, inputs.segment_ids)
    low = mask & ((ratio < token_mask_low) | (geo < geo_mask_low) | (least < sequence_mask_low))
    high = mask & ((ratio > token_mask_high) | (geo > geo_mask_high) | (greatest > sequence_mask_high))
    if ratio_type == "sequence":
        # Limited once more: a sum of many tokens is beyond what exp can take.
        total = sequence_sum(difference, inputs.segment_ids).clamp(-20.0, 20.0)
        ratio = total.exp().clamp(max=sequence_clip_high)
    target = adv_tau * masked_advantages(inputs) - kl_tau * difference
    if teacher_tau:
        if inputs.ref_logprobs is None:
            raise RunError("loss.teacher_tau needs a reference model, and the batch has no ref_logprobs; set reference")
        target = target + teacher_tau * limited_difference(inputs.ref_logprobs, inputs.logprobs.detach(), mask)
    dropped = low | high
    weight = torch.where(dropped, 0.0, ratio * target)
    return LossOutput(-weight * masked_logprobs(inputs), low, high, dropped)


def _extremes(ratio: Tensor, mask: Tensor, segment_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Give every token the least and the greatest ratio among the trained tokens of its segment."""
    ones = torch.ones_like(ratio)  # outside the mask the ratio is 1, which may not be among the trained ones
    least = ones.scatter_reduce(0, segment_ids, torch.where(mask, ratio, torch.inf), "amin", include_self=False)
    greatest = ones.scatter_reduce(0, segment_ids, torch.where(mask, ratio, 0.0), "amax", include_self=False)
    return least[segment_ids], greatest[segment_ids]
