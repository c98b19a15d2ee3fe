"""The loss of reinforcement learning over one row, and what is reported of it.

total = (L_rl + kl.coef L_kl) / N_rl + L_ce / N_ce + L_refkl / N_refkl, each N counted over all ranks (I9). Which means
are reported depends on the configuration and on the batch's streams, never on a row's values: all ranks have the same
names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from prime_rl.configs.loss import KLConfig, LossConfig
from prime_rl.errors import RunError
from prime_rl.trainer.engine import Objective, Scored
from prime_rl.trainer.losses import (
    Loss,
    LossInputs,
    LossOutput,
    Normalization,
    build_loss,
    cross_entropy,
    distillation,
    kl_penalty,
    log_ratio,
    token_weights,
)
from prime_rl.trainer.means import Weighted
from prime_rl.trainer.truncation import Truncation

# Bound on the importance ratio of distilled tokens: the default loss's.
_DISTILLATION_CLIP = 8.0


@dataclass(frozen=True, slots=True)
class Component:
    """One part of the loss of a row.

    Attributes:
        losses: [T], of each token.
        weights: [T], what each counts, already divided by the N of all ranks.
        mask: bool [T], the tokens that N counts.
        count: N, of all ranks.
    """

    losses: Tensor
    weights: Tensor
    mask: Tensor
    count: int

    @property
    def share(self) -> Tensor:
        """The row's share of the minibatch's loss, a scalar."""
        return (self.losses * self.weights).sum()


def build_objective(config: LossConfig, seq_len: int) -> Callable[[Scored], Objective]:
    """Make the engine's objective of a configured loss.

    Args:
        config: the loss.
        seq_len: what `fixed_length` is where it is left out, tokens.

    Raises:
        ConfigError: a loss of the user's own that cannot be loaded.
    """
    return rl_objective(build_loss(config), config.normalization, config.fixed_length or seq_len, config.kl)


def rl_objective(
    loss: Loss, normalization: Normalization = "token", fixed_length: int = 1, kl: KLConfig | None = None
) -> Callable[[Scored], Objective]:
    """Make the engine's objective of `loss`, its tokens weighed as `token_weights` says, with the penalty `kl`."""
    weigh = partial(token_weights, normalization=normalization, fixed_length=fixed_length)

    def objective(scored: Scored) -> Objective:
        inputs = _inputs(scored)
        output = loss(inputs)
        weights = weigh(inputs.mask, inputs.segment_ids, scored.counts)
        if scored.row.rl_weights is not None:
            weights = weights * torch.where(inputs.mask, scored.row.rl_weights, 0.0)
        means = _measure(scored, inputs, output)
        parts = {"rl": Component(output.loss, weights, inputs.mask, scored.counts.tokens)}
        if kl is not None:
            penalty = kl_penalty(
                inputs.logprobs, _reference(inputs, "loss.kl"), inputs.mask, kl.estimator, kl.straight_through
            )
            means["kl/reference"] = _over(inputs.mask, penalty.detach())
            parts["kl"] = Component(penalty, kl.coef * weights, inputs.mask, scored.counts.tokens)
        parts |= _streams(scored, inputs)
        if len(parts) > 1:
            means |= {f"loss/{name}": _mean_of(part) for name, part in parts.items()}
        return Objective(torch.stack([part.share for part in parts.values()]).sum(), means)

    return objective


def _inputs(scored: Scored) -> LossInputs:
    row = scored.row
    return LossInputs(
        logprobs=scored.logprobs,
        sampler_logprobs=row.sampler_logprobs,
        advantages=row.advantages,
        mask=row.loss_mask if row.rl_weights is None else row.loss_mask & (row.rl_weights != 0),
        segment_ids=row.segment_ids,
        proximal_logprobs=row.proximal_logprobs,
        ref_logprobs=row.ref_logprobs,
    )


def _streams(scored: Scored, inputs: LossInputs) -> dict[str, Component]:
    """Cross-entropy and distillation, where the batch brings weights for them."""
    row, counts, parts = scored.row, scored.counts, dict[str, Component]()
    if row.ce_weights is not None:
        mask = row.loss_mask & (row.ce_weights != 0)
        losses = cross_entropy(scored.logprobs, mask)
        parts["ce"] = Component(losses, _share_out(row.ce_weights, mask, counts.ce_tokens), mask, counts.ce_tokens)
    if row.ref_kl_weights is not None:
        mask = row.loss_mask & (row.ref_kl_weights != 0)
        reference = _reference(inputs, "ref_kl_weights")
        losses = distillation(scored.logprobs, row.sampler_logprobs, reference, mask, _DISTILLATION_CLIP)
        weights = _share_out(row.ref_kl_weights, mask, counts.ref_kl_tokens)
        parts["ref_kl"] = Component(losses, weights, mask, counts.ref_kl_tokens)
    return parts


def _share_out(weights: Tensor, mask: Tensor, count: int) -> Tensor:
    return torch.where(mask, weights, 0.0) / count


def _reference(inputs: LossInputs, needed_by: str) -> Tensor:
    if inputs.ref_logprobs is None:
        raise RunError(
            f"{needed_by} needs log-probabilities of a reference model, and the batch has no ref_logprobs; "
            "set reference.name (or reference.source = 'model') to have the trainer compute them"
        )
    return inputs.ref_logprobs


@torch.no_grad()
def _measure(scored: Scored, inputs: LossInputs, output: LossOutput) -> dict[str, Weighted]:
    """Means over tokens; the mismatch only while the weights are still those of version n.

    The mismatch is Schulman's k3 estimate of KL(sampler || trainer), r - log r - 1 with r = trainer / sampler, in
    float64: for the differences of fp32 kernels, about 1e-6, it is 1e-12, which float32 rounds to 0.
    """
    mask = inputs.mask
    log_r = log_ratio(inputs).double()
    mismatch = torch.expm1(log_r) - log_r
    compared = mask & scored.untouched
    on_policy = compared & scored.row.on_policy
    return {
        "entropy": _over(mask, scored.entropy),
        "mismatch_kl": _over(compared, mismatch),
        "mismatch_kl/on_policy": _over(on_policy, mismatch),
        "mismatch_logprob/on_policy": _over(on_policy, log_r.abs()),
        "importance_ratio/mean": _over(mask, log_r.exp()),
        "importance_ratio/clipped": _over(mask, (output.low | output.high).float()),
        "importance_ratio/clipped_low": _over(mask, output.low.float()),
        "importance_ratio/clipped_high": _over(mask, output.high.float()),
        "importance_ratio/masked": _over(mask, output.masked.float()),
        **_left_out(scored, mask),
    }


def _left_out(scored: Scored, mask: Tensor) -> dict[str, Weighted]:
    """Of the tokens whose distribution the sampler cut, how many the policy's own cut leaves out."""
    truncation = Truncation.of(scored.row)
    if truncation is None or scored.left_out is None:
        return {}
    return {"truncation/left_out": _over(mask & truncation.active, scored.left_out.float())}


def _over(mask: Tensor, values: Tensor) -> Weighted:
    return torch.where(mask, values, 0.0).sum(), mask.sum()


def _mean_of(part: Component) -> Weighted:
    """The part's loss over the minibatch, as a sum and a count that other rows and ranks can be added to."""
    return part.share.detach() * part.count, part.mask.sum()
