"""Forward, backward and update of one step, shared by reinforcement learning and supervised fine-tuning."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from prime_rl.core.errors import RunError
from prime_rl.trainer.fsdp import reshard_policy
from prime_rl.trainer.metrics.entropy_quantiles import EntropyQuantiles
from prime_rl.trainer.metrics.gradient_norms import layer_gradient_norms
from prime_rl.trainer.micro_batch import MicroBatch
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.optim.lr_schedule import LearningRates
from prime_rl.trainer.parallel.gradients import clip_gradients, gradient_norm, set_gradient_reduction
from prime_rl.trainer.parallel.process_group import World

_MAX_SKIPPED_STEPS = 3

WeightedSum = tuple[Tensor, Tensor]
"""A sum and the count that divides it, scalars."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Divisors of the parts of a loss, counted over the rows of all ranks, before any mask that a loss adds (I9)."""

    tokens: int  # trained tokens, at least 1; with `rl_weights`, those whose weight is not 0
    sequences: int = 1  # samples, trained on or not, at least 1
    ce_tokens: int = 1  # trained tokens whose `ce_weights` is not 0, at least 1
    ref_kl_tokens: int = 1  # trained tokens whose `ref_kl_weights` is not 0, at least 1


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The data of one optimizer step."""

    rows: Sequence[MicroBatch]  # this rank's micro-batches; every rank has the same number, at least one
    counts: Counts  # over the rows of all ranks


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """One row after the forward pass."""

    row: MicroBatch  # the micro-batch, on the device
    logprobs: Tensor  # float32 [T], differentiable, 0 outside the mask
    entropy: Tensor  # float32 [T], 0 outside the mask
    before_first_update: bool  # no optimizer step was taken yet in this step
    counts: Counts  # of the row's minibatch, over all ranks
    # bool [T], tokens that the policy's own top-k, top-p and min-p would remove; None where sampling was not
    # truncated
    outside_sampling_mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """Result of an objective for one row."""

    # scalar, the row's part of the minibatch's loss: summed over its tokens, divided by `ScoredRow.counts`
    loss: Tensor
    means: dict[str, WeightedSum]  # sums and counts of the reported metrics; the same names for every row


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step, equal on all ranks."""

    loss: float | None  # mean over the minibatches; None if all were skipped
    grad_norm: float | None  # mean over the minibatches of the norm before clipping; None if all were skipped
    skipped: int  # number of minibatches without an update, because their gradient or loss was not finite
    means: dict[str, float | None]  # metrics of the objective and of the use of experts; None where nothing was counted
    rates: dict[str, float]  # the learning rates of the step, `lr` and `lr/<role>`
    layer_norms: dict[str, float] = field(default_factory=dict)  # as `grad_norm`, by layer and role; {} if not due


class MetricAccumulator:
    """Running sums and counts by name, over rows and ranks. Every rank must add the same names."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, WeightedSum]) -> None:
        """Add sums and counts; they stay on the device, so nothing is synchronised."""
        for name, pair in values.items():
            total = torch.stack([x.detach().double() for x in pair])
            self._totals[name] = self._totals[name] + total if name in self._totals else total

    def reduce(self, world: World) -> dict[str, float | None]:
        """Sum over all ranks and divide; None where nothing was counted or the mean is not finite."""
        names = sorted(self._totals)
        if not names:
            return {}
        totals = world.sum_rows(torch.stack([self._totals[name] for name in names])).tolist()
        means = [total / count if count else math.nan for total, count in totals]
        return {name: mean if math.isfinite(mean) else None for name, mean in zip(names, means, strict=True)}


class TrainStep:
    """Forward, backward and update over minibatches of packed rows.

    Gradients are summed over ranks, never averaged: the objective divides by counts over all ranks (I9).

    Attributes:
        synchronize_seconds: how long this rank waited for the slowest one after the backward passes of the last step.
    """

    def __init__(
        self,
        policy: PolicyModel,
        optimizer: Optimizer,
        world: World,
        max_norm: float | None,
        on_row: Callable[[], None] = lambda: None,
        reduce_once: bool = False,
    ) -> None:
        """Store the parts of a step.

        A gradient norm `max_norm` None does not clip; `on_row` is called after every micro-batch; `reduce_once` reduces
        gradients over ranks once per minibatch, not once per row (`set_gradient_reduction`).
        """
        self._policy, self._optimizer, self._world, self._on_row = policy, optimizer, world, on_row
        self._reduce_once = reduce_once
        self._max_norm = float("inf") if max_norm is None else max_norm
        self._rates = LearningRates(optimizer)
        self._skipped_steps = 0
        self._entropies = EntropyQuantiles()
        self.synchronize_seconds = 0.0

    def step(
        self,
        minibatches: Sequence[Minibatch],
        objective: Callable[[ScoredRow], Objective],
        factor: float,
        layer_norms: bool = False,
    ) -> StepResult:
        """Take one optimizer step per minibatch, all at `factor` times the peak rates. All ranks call it together.

        With `layer_norms`, the result has the gradient norm of each layer and role.

        Raises:
            ConfigError: a row has tokens or positions outside the model's range.
            RunError: three steps in a row took no update, because every gradient was non-finite (I10).
        """
        rates = self._rates.apply(factor)
        means, losses, norms = MetricAccumulator(), list[float](), list[float]()
        by_layer = list[dict[str, float]]()
        self.synchronize_seconds = 0.0
        for minibatch in minibatches:
            loss = self._backward(minibatch, objective, means, before_first_update=not norms)
            if layer_norms:
                by_layer.append(layer_gradient_norms(self._policy, self._world))
            norm = self._update(loss)
            if norm is not None:
                losses.append(loss)
                norms.append(norm)
        self._skipped_steps = 0 if norms else self._skipped_steps + 1
        if self._skipped_steps >= _MAX_SKIPPED_STEPS:
            raise RunError(
                f"the gradient was not finite in {_MAX_SKIPPED_STEPS} consecutive steps; lower optim.lr, or check the "
                "batches for non-finite logprobs or advantages"
            )
        return StepResult(
            loss=sum(losses) / len(losses) if losses else None,
            grad_norm=sum(norms) / len(norms) if norms else None,
            skipped=len(minibatches) - len(norms),
            means=means.reduce(self._world)
            | self._entropies.reduce(self._world)
            | self._policy.routing.reduce(self._world.sum, self._world.device),
            rates=rates,
            layer_norms={
                name: sum(norms[name] for norms in by_layer) / len(by_layer) for name in (by_layer or [{}])[0]
            },
        )

    @torch.no_grad()
    def evaluate(self, minibatch: Minibatch, objective: Callable[[ScoredRow], Objective]) -> float:
        """Compute the loss of a minibatch without an update. All ranks call it together."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for row in minibatch.rows:
            total += objective(self._score(row, minibatch.counts, before_first_update=True)).loss
            self._on_row()
        reshard_policy(self._policy)
        return self._world.sum_rows(total).item()

    def _backward(
        self,
        minibatch: Minibatch,
        objective: Callable[[ScoredRow], Objective],
        means: MetricAccumulator,
        before_first_update: bool,
    ) -> float:
        """Accumulate the gradient of the minibatch over all ranks; return its loss over all ranks."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for i, row in enumerate(minibatch.rows):
            set_gradient_reduction(self._policy, last=i == len(minibatch.rows) - 1, once=self._reduce_once)
            scored = self._score(row, minibatch.counts, before_first_update)
            result = objective(scored)
            result.loss.backward()
            self._entropies.add(scored.entropy, scored.row.loss_mask)
            total += result.loss.detach()
            means.add(result.means)
            self._on_row()
        if self._world.device.type == "cuda":  # reading the loss below would wait for the backward pass anyway
            torch.cuda.current_stream(self._world.device).synchronize()
        start = time.perf_counter()
        loss = self._world.sum_rows(total).item()
        self.synchronize_seconds += time.perf_counter() - start
        return loss

    def _score(self, row: MicroBatch, counts: Counts, before_first_update: bool) -> ScoredRow:
        self._policy.check_row(row)
        row = row.to(self._world.device)
        logprobs, entropy, *outside_sampling_mask = self._policy(row)
        return ScoredRow(row, logprobs, entropy, before_first_update, counts, *outside_sampling_mask)

    def _update(self, loss: float) -> float | None:
        """Clip the gradient and apply it; return its norm before clipping, None if it or the loss is not finite."""
        norm = gradient_norm(self._policy.parameters(), self._world)
        usable = math.isfinite(norm) and math.isfinite(loss)
        if usable:
            clip_gradients(self._policy.parameters(), norm, self._max_norm)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm if usable else None
