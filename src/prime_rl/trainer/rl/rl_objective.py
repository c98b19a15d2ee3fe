"""The loss of reinforcement learning over one row, and its metrics.

total = (L_rl + kl.coef L_kl) / N_rl + L_ce / N_ce + L_refkl / N_refkl, each N counted over all ranks (I9). The names of
the metrics depend on the configuration and the batch's streams, never on a row's values, so they are equal on all
ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from prime_rl.configs.training.loss import KLConfig, LossConfig
from prime_rl.core.errors import RunError
from prime_rl.trainer.losses import build_loss
from prime_rl.trainer.losses.auxiliary_losses import cross_entropy, distillation, kl_penalty
from prime_rl.trainer.losses.loss_inputs import (
    Loss,
    LossInputs,
    LossOutput,
    Normalization,
    finite,
    log_ratio,
    token_weights,
)
from prime_rl.trainer.model.sampling_mask import SamplingMask
from prime_rl.trainer.train_step import Objective, ScoredRow, WeightedSum

# Bound on the importance ratio of distilled tokens; the default of AIPO.
_DISTILLATION_CLIP = 8.0


@dataclass(frozen=True, slots=True)
class LossComponent:
    """One part of the loss of a row."""

    losses: Tensor  # [T], per token
    weights: Tensor  # [T], weight of each token, already divided by `count`
    mask: Tensor  # bool [T], the tokens that `count` counts
    count: int  # N, over all ranks

    @property
    def total(self) -> Tensor:
        """The row's part of the minibatch's loss, a scalar."""
        return (self.losses * self.weights).sum()


TokenObserver = Callable[[ScoredRow, LossInputs, LossOutput], None]
"""Gets the values of each token of a row."""


def build_objective(
    config: LossConfig, seq_len: int, observe: TokenObserver = lambda scored, inputs, output: None
) -> Callable[[ScoredRow], Objective]:
    """Build the objective of a configured loss; `seq_len` is the default of `fixed_length`."""
    length = config.fixed_length or seq_len
    return rl_objective(build_loss(config), config.normalization, length, config.kl, observe)


def rl_objective(
    loss: Loss,
    normalization: Normalization = "token",
    fixed_length: int = 1,
    kl: KLConfig | None = None,
    observe: TokenObserver = lambda scored, inputs, output: None,
) -> Callable[[ScoredRow], Objective]:
    """Build the objective of `loss` with the token weights of `token_weights` and the penalty `kl`.

    `observe` is called with the loss of each row.
    """
    weigh = partial(token_weights, normalization=normalization, fixed_length=fixed_length)

    def objective(scored: ScoredRow) -> Objective:
        inputs = _inputs(scored)
        output = loss(inputs)
        observe(scored, inputs, output)
        weights = weigh(inputs.mask, inputs.segment_ids, scored.counts)
        if scored.row.rl_weights is not None:
            weights = weights * torch.where(inputs.mask, scored.row.rl_weights, 0.0)
        means = _measure(scored, inputs, output)
        parts = {"rl": LossComponent(output.loss, weights, inputs.mask, scored.counts.tokens)}
        if kl is not None:
            penalty = kl_penalty(
                inputs.logprobs, _reference(inputs, "loss.kl"), inputs.mask, kl.estimator, kl.straight_through
            )
            means["kl/reference"] = _over(inputs.mask, penalty.detach())
            parts["kl"] = LossComponent(penalty, kl.coef * weights, inputs.mask, scored.counts.tokens)
        parts |= _streams(scored, inputs)
        if len(parts) > 1:
            # The component's loss over the minibatch as a sum and a count.
            means |= {f"loss/{k}": (part.total.detach() * part.count, part.mask.sum()) for k, part in parts.items()}
        return Objective(torch.stack([part.total for part in parts.values()]).sum(), means)

    return objective


def _inputs(scored: ScoredRow) -> LossInputs:
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


def _streams(scored: ScoredRow, inputs: LossInputs) -> dict[str, LossComponent]:
    """Cross-entropy and distillation, if the batch has weights for them."""
    row, counts, parts = scored.row, scored.counts, dict[str, LossComponent]()
    if row.ce_weights is not None:
        mask = row.loss_mask & (row.ce_weights != 0)
        losses = cross_entropy(scored.logprobs, mask)
        weights = torch.where(mask, row.ce_weights, 0.0) / counts.ce_tokens
        parts["ce"] = LossComponent(losses, weights, mask, counts.ce_tokens)
    if row.ref_kl_weights is not None:
        mask = row.loss_mask & (row.ref_kl_weights != 0)
        reference = _reference(inputs, "ref_kl_weights")
        losses = distillation(scored.logprobs, row.sampler_logprobs, reference, mask, _DISTILLATION_CLIP)
        weights = torch.where(mask, row.ref_kl_weights, 0.0) / counts.ref_kl_tokens
        parts["ref_kl"] = LossComponent(losses, weights, mask, counts.ref_kl_tokens)
    return parts


def _reference(inputs: LossInputs, needed_by: str) -> Tensor:
    if inputs.ref_logprobs is None:
        raise RunError(
            f"{needed_by} needs log-probabilities of a reference model, but the batch has no ref_logprobs; "
            "set reference.name (or reference.source = 'model') to let the trainer compute them"
        )
    return inputs.ref_logprobs


@torch.no_grad()
def _measure(scored: ScoredRow, inputs: LossInputs, output: LossOutput) -> dict[str, WeightedSum]:
    """Means over tokens; the mismatch only before the first update, while the weights are version n."""
    # Schulman's k3 estimate of KL(sampler || trainer), r - log r - 1 with r = trainer / sampler. In float64, because
    # kernels in fp32 differ by about 1e-6, which gives 1e-12.
    mask = inputs.mask
    log_r = log_ratio(inputs).double()
    mismatch = torch.expm1(log_r) - log_r
    compared = mask & scored.before_first_update
    on_policy = compared & scored.row.on_policy
    means = {
        "logprob/mean": _over(mask, finite(inputs.logprobs)),
        "entropy": _over(mask, scored.entropy),
        "mismatch_kl": _over(compared, mismatch),
        "mismatch_kl/on_policy": _over(on_policy, mismatch),
        "mismatch_logprob/on_policy": _over(on_policy, log_r.abs()),
        "importance_ratio/mean": _over(mask, log_r.exp()),
        "importance_ratio/clipped": _over(mask, (output.low | output.high).float()),
        "importance_ratio/clipped_low": _over(mask, output.low.float()),
        "importance_ratio/clipped_high": _over(mask, output.high.float()),
        "importance_ratio/masked": _over(mask, output.masked.float()),
    }
    truncation = SamplingMask.of(scored.row)
    if truncation is not None and scored.outside_sampling_mask is not None:
        outside = _over(mask & truncation.active, scored.outside_sampling_mask.float())
        means["sampling_mask/outside_trainer_mask"] = outside
    return means


def _over(mask: Tensor, values: Tensor) -> WeightedSum:
    return torch.where(mask, values, 0.0).sum(), mask.sum()
