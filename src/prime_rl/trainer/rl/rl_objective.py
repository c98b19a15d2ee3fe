"""The loss of reinforcement learning over one row, and its metrics.

total = (L_rl + kl.coef L_kl - entropy_coef H) / N_rl + L_ce / N_ce + L_refkl / N_refkl, each N counted over all
ranks (I9). The names of the metrics depend on the configuration and the batch's streams, never on a row's values, so
they are equal on all ranks.

`References` scores rows with a reference model, for the KL penalty and distillation, and with the policy before the
first update of a step, for decoupled PPO and the tokens of the highest entropy.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.training.loss import CustomLossConfig, DecoupledPPOLossConfig, KLConfig, LossConfig
from prime_rl.configs.training.model import DebugModelConfig
from prime_rl.core.errors import ConfigError, RunError, translate_error
from prime_rl.storage.batch import Batch
from prime_rl.trainer.fsdp import reshard_policy
from prime_rl.trainer.losses.loss_functions import build_loss, cross_entropy, distillation, kl_penalty
from prime_rl.trainer.losses.loss_inputs import (
    Loss,
    LossInputs,
    LossOutput,
    Normalization,
    clamped_difference,
    finite,
    log_ratio,
    token_weights,
)
from prime_rl.trainer.micro_batch import MicroBatch
from prime_rl.trainer.model.lm_head import SamplingMask
from prime_rl.trainer.model.lora import AdaptedLinear, ExpertsAdapter, adapted_experts, adapted_layers
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.parallel.process_group import RankConsensus, World
from prime_rl.trainer.train_step import Minibatch, Objective, ScoredRow, WeightedSum
from prime_rl.trainer.weights.policy_loading import make_policy

# Bound on the importance ratio of distilled tokens; the default of AIPO.
_DISTILLATION_CLIP = 8.0


@dataclass(frozen=True, slots=True)
class LossComponent:
    """One part of the loss of a row."""

    losses: Tensor  # [T], per token
    weights: Tensor  # [T], weight of each token, already divided by the counts of the minibatch

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
    return rl_objective(build_loss(config), config.normalization, length, config.kl, observe, config.entropy_coef)


def rl_objective(
    loss: Loss,
    normalization: Normalization = "token",
    fixed_length: int = 1,
    kl: KLConfig | None = None,
    observe: TokenObserver = lambda scored, inputs, output: None,
    entropy_coef: float = 0.0,
) -> Callable[[ScoredRow], Objective]:
    """Build the objective of `loss` with the token weights of `token_weights`, the penalty `kl` and an entropy bonus.

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
        chosen = scored.row.policy_gradient
        parts = {"rl": LossComponent(output.loss, weights if chosen is None else weights * chosen)}
        if kl is not None:
            penalty = kl_penalty(
                inputs.logprobs, _reference(inputs, "loss.kl"), inputs.mask, kl.estimator, kl.straight_through
            )
            if kl.importance_weight:
                # The gradient of k2 is that of the KL, and needs no term for the ratio. Those of k1 and k3 need one.
                has_own_gradient = kl.straight_through or kl.estimator == "k2"
                ratio = log_ratio(inputs).exp()
                penalty = penalty * (ratio.detach() if has_own_gradient else ratio)
            means["kl/reference"] = _over(inputs.mask, penalty.detach())
            parts["kl"] = LossComponent(penalty, kl.coef * weights)
        if entropy_coef:
            assert scored.entropy.requires_grad, "PolicyModel.entropy_gradient is not set"
            parts["entropy"] = LossComponent(torch.where(inputs.mask, -scored.entropy, 0.0), entropy_coef * weights)
        parts |= _streams(scored, inputs)
        totals = {name: part.total for name, part in parts.items()}
        return Objective(torch.stack(list(totals.values())).sum(), means, totals if len(totals) > 1 else {})

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
        parts["ce"] = LossComponent(losses, weights)
    if row.ref_kl_weights is not None:
        mask = row.loss_mask & (row.ref_kl_weights != 0)
        reference = _reference(inputs, "ref_kl_weights")
        losses = distillation(scored.logprobs, row.sampler_logprobs, reference, mask, _DISTILLATION_CLIP)
        weights = torch.where(mask, row.ref_kl_weights, 0.0) / counts.ref_kl_tokens
        parts["ref_kl"] = LossComponent(losses, weights)
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
    mask = scored.row.loss_mask  # of all trained tokens, also those without a policy gradient
    log_r, mismatch = _mismatch(scored)
    compared = mask & scored.before_first_update
    on_policy = compared & scored.row.on_policy
    means = {
        "logprob/mean": _over(mask, finite(inputs.logprobs)),
        "entropy": _over(mask, scored.entropy),
        "mismatch_kl": _over(compared, mismatch),
        "mismatch_kl/on_policy": _over(on_policy, mismatch),
        "mismatch_logprob/on_policy": _over(on_policy, log_r.abs()),
        "importance_ratio/mean": _over(mask, log_r.exp()),
        "importance_ratio/clipped": _over(inputs.mask, (output.low | output.high).float()),
        "importance_ratio/clipped_low": _over(inputs.mask, output.low.float()),
        "importance_ratio/clipped_high": _over(inputs.mask, output.high.float()),
        "importance_ratio/masked": _over(inputs.mask, output.masked.float()),
    }
    truncation = SamplingMask.of(scored.row)
    if truncation is not None and scored.outside_sampling_mask is not None:
        outside = _over(mask & truncation.active, scored.outside_sampling_mask.float())
        means["sampling_mask/outside_trainer_mask"] = outside
    return means


def _mismatch(scored: ScoredRow) -> tuple[Tensor, Tensor]:
    """Return log r, r = trainer / sampler, and Schulman's k3 estimate of KL(sampler || trainer), r - log r - 1 [T].

    In float64, because kernels in fp32 differ by about 1e-6, which gives 1e-12.
    """
    row = scored.row
    log_r = clamped_difference(scored.logprobs.detach(), row.sampler_logprobs, row.loss_mask).double()
    return log_r, torch.expm1(log_r) - log_r


def with_source_metrics(objective: Callable[[ScoredRow], Objective], batch: Batch) -> Callable[[ScoredRow], Objective]:
    """Return `objective`, which also reports the mismatch by environment and by server if `batch` has several."""
    if not batch.sources:
        return objective
    ends = np.cumsum(batch.seq_lens)
    members = {name: np.isin(batch.sample_group, groups) for name, groups in batch.sources.items()}

    def measured(scored: ScoredRow) -> Objective:
        result, row = objective(scored), scored.row
        samples = None if row.positions is None else np.searchsorted(ends, row.positions, side="right")
        mismatch, means = _mismatch(scored)[1], dict(result.means)
        for name, member in members.items():
            own = torch.zeros_like(row.loss_mask) if samples is None else torch.from_numpy(member[samples])
            compared = row.loss_mask & own.to(row.loss_mask.device) & scored.before_first_update
            means[f"mismatch_kl/{name}"] = _over(compared, mismatch)
            means[f"mismatch_kl/on_policy/{name}"] = _over(compared & row.on_policy, mismatch)
        return replace(result, means=means)

    return measured


def _over(mask: Tensor, values: Tensor) -> WeightedSum:
    return torch.where(mask, values, 0.0).sum(), mask.sum()


class References:
    """Adds `ref_logprobs`, `proximal_logprobs` and `policy_gradient` to rows, if the configured loss needs them."""

    def __init__(self, config: TrainerConfig, policy: PolicyModel, world: World) -> None:
        """Load the reference model, if one is needed. All ranks call it together.

        If the policy trains adapters on the reference model, the policy without adapters is used; nothing is loaded.
        Raises ConfigError if the reference model is missing or not supported.
        """
        self._policy, self._world, self._top_entropy = policy, world, config.loss.top_entropy_quantile
        self._needs_proximal = isinstance(config.loss, DecoupledPPOLossConfig) or (
            isinstance(config.loss, CustomLossConfig) and config.loss.proximal
        )
        self._model: PolicyModel | None = None
        self._without_adapters = False
        if config.reference_name is not None:
            self._without_adapters = config.model.lora is not None and config.reference_name == config.model.name
            self._model = policy if self._without_adapters else _load_reference(config, config.reference_name, world)

    def score(self, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Return the minibatches with the log-probabilities in their rows. All ranks call it together.

        `ref_logprobs` that the batch contains stay. `proximal_logprobs` of the first minibatch stay None: they
        are those of its forward pass. Raises ConfigError if the batch has tokens or positions outside the
        reference model's range.
        """
        scored = list(minibatches)
        if self._model is not None and scored[0].rows[0].ref_logprobs is None:
            scored = [_add(part, "ref_logprobs", self._reference) for part in scored]
            reshard_policy(self._model)
        if self._needs_proximal:
            scored[1:] = [_add(part, "proximal_logprobs", self._proximal) for part in scored[1:]]
        return scored if self._top_entropy == 1 else [self._choose_tokens(part) for part in scored]

    @torch.no_grad()
    def _choose_tokens(self, minibatch: Minibatch) -> Minibatch:
        """Give a policy gradient to the tokens from the quantile 1 - `top_entropy_quantile` of the entropy on.

        As TRL's `get_high_entropy_mask`, but over the whole minibatch, which does not depend on rows and ranks (I9).
        """
        for row in minibatch.rows:
            self._policy.check_row(row)
        entropies = [self._policy(row.to(self._world.device))[1].cpu() for row in minibatch.rows]
        masks = [
            row.loss_mask if row.rl_weights is None else row.loss_mask & (row.rl_weights != 0) for row in minibatch.rows
        ]
        own = torch.cat([values[mask] for values, mask in zip(entropies, masks, strict=True)]).numpy()
        by_rank = RankConsensus(self._world).gather(lambda: own)
        values = np.concatenate(by_rank[:: self._world.model_parallel_size])  # ranks with the same rows count once
        threshold = np.quantile(values, 1 - self._top_entropy) if len(values) else 0.0
        chosen = [torch.from_numpy(values.numpy() >= threshold) for values in entropies]
        rows = zip(minibatch.rows, chosen, strict=True)
        return replace(minibatch, rows=[replace(row, policy_gradient=tokens) for row, tokens in rows])

    def _reference(self, row: MicroBatch) -> Tensor:
        assert self._model is not None
        with translate_error(ConfigError, lambda error: ConfigError(f"reference.name: {error}")):
            self._model.check_row(row)
        row = replace(row, routed_experts=None)  # the reference model chooses its own experts
        with _adapters_off(self._policy) if self._without_adapters else torch.no_grad():
            return _logprobs(self._model, row.to(self._world.device))

    def _proximal(self, row: MicroBatch) -> Tensor:
        self._policy.check_row(row)
        return _logprobs(self._policy, row.to(self._world.device))


def _load_reference(config: TrainerConfig, name: str, world: World) -> PolicyModel:
    """Load a frozen model, sharded like the policy, in the precision of the forward pass."""
    changed: dict[str, Any] = {"name": name, "router_replay": False}
    changed |= dict.fromkeys(("lora", "ac", "ac_offloading"))
    if name != config.model.name:
        changed["debug"] = DebugModelConfig()  # a teacher is complete even if the policy is shrunk or random
    with translate_error(ConfigError, lambda error: ConfigError(f"reference.name = {name!r}: {error}")):
        return make_policy(config.model.model_copy(update=changed), config.seed, world, frozen=True)


def _add(minibatch: Minibatch, field: str, score: Callable[[MicroBatch], Tensor]) -> Minibatch:
    return replace(minibatch, rows=[replace(row, **{field: score(row)}) for row in minibatch.rows])


@torch.no_grad()
def _logprobs(model: PolicyModel, row: MicroBatch) -> Tensor:
    return model(row)[0]


@contextmanager
def _adapters_off(policy: PolicyModel) -> Iterator[None]:
    """Scale the adapters by 0, which gives the base model with the same collectives on all ranks."""
    layers: list[AdaptedLinear | ExpertsAdapter] = [*adapted_layers(policy).values(), *adapted_experts(policy).values()]
    configs = [layer.config for layer in layers]
    for layer in layers:
        layer.config = layer.config.model_copy(update={"alpha": 0.0})
    try:
        yield
    finally:
        for layer, config in zip(layers, configs, strict=True):
            layer.config = config
