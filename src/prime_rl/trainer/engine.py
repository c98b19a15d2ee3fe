"""The step engine that reinforcement learning and supervised fine-tuning share.

I9 world size is invisible: the objective divides by counts of the whole minibatch on all ranks, so a row's loss is its
share of the minibatch's; gradients are summed over ranks, never averaged.
I10 finite: a minibatch with a non-finite gradient or loss takes no optimizer step and is counted; three steps in a row
without a single update end the run.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from prime_rl.errors import RunError
from prime_rl.trainer.gradients import accumulate, clip_gradients, gradient_norm
from prime_rl.trainer.means import Means, Weighted
from prime_rl.trainer.micro_batch import MicroBatch
from prime_rl.trainer.model import PolicyModel
from prime_rl.trainer.optim import LearningRates
from prime_rl.trainer.parallel import World

_LOST_STEPS = 3


@dataclass(frozen=True, slots=True)
class Counts:
    """What the parts of a loss are divided by: counted over the rows of all ranks, before any mask that a loss adds.

    Attributes:
        tokens: trained tokens, at least 1; where the rows have `rl_weights`, those whose weight is not 0.
        sequences: samples, trained on or not, at least 1.
        ce_tokens: trained tokens whose `ce_weights` is not 0, at least 1.
        ref_kl_tokens: trained tokens whose `ref_kl_weights` is not 0, at least 1.
    """

    tokens: int
    sequences: int = 1
    ce_tokens: int = 1
    ref_kl_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one optimizer step trains on.

    Attributes:
        rows: this rank's micro-batches; every rank has equally many, at least one.
        counts: of the rows of all ranks.
    """

    rows: Sequence[MicroBatch]
    counts: Counts


@dataclass(frozen=True, slots=True)
class Scored:
    """One row after the forward pass.

    Attributes:
        row: the micro-batch, on the device.
        logprobs: float32 [T], differentiable, 0 outside the mask.
        entropy: float32 [T], 0 outside the mask.
        untouched: the weights are still those the step began with: no optimizer step was taken yet.
        counts: of the minibatch that the row belongs to, over all ranks.
        left_out: bool [T], tokens that the policy's own top-k, top-p and min-p would not keep; None where nothing was
            cut.
    """

    row: MicroBatch
    logprobs: Tensor
    entropy: Tensor
    untouched: bool
    counts: Counts
    left_out: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """What an objective answers for one row.

    Attributes:
        loss: scalar, the row's share of the minibatch's loss: summed over its tokens, divided by `Scored.counts`.
        means: sums and counts of what is reported; the same names for every row.
    """

    loss: Tensor
    means: dict[str, Weighted]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did, equal on all ranks.

    Attributes:
        loss: mean over the minibatches; None if every one was skipped.
        grad_norm: mean over the minibatches of the norm before clipping; None if every one was skipped.
        skipped: minibatches whose gradient or loss was not finite, which took no optimizer step.
        means: what the objective reported, and how experts were used, as means; None where nothing was counted.
        rates: the learning rates that were used, `lr` and `lr/<role>`.
    """

    loss: float | None
    grad_norm: float | None
    skipped: int
    means: dict[str, float | None]
    rates: dict[str, float]


class Engine:
    """Forward, backward and update over minibatches of packed rows."""

    def __init__(
        self,
        policy: PolicyModel,
        optimizer: Optimizer,
        world: World,
        max_norm: float | None,
        on_row: Callable[[], None] = lambda: None,
    ) -> None:
        """Take a sharded policy and the optimizer over its parameters.

        Args:
            policy: sharded.
            optimizer: over its trained parameters.
            world: the ranks.
            max_norm: of the gradient; None does not clip.
            on_row: called whenever a micro-batch is done.
        """
        self._policy, self._optimizer, self._world, self._on_row = policy, optimizer, world, on_row
        self._max_norm = float("inf") if max_norm is None else max_norm
        self._rates = LearningRates(optimizer)
        self._lost_steps = 0

    def step(
        self, minibatches: Sequence[Minibatch], objective: Callable[[Scored], Objective], factor: float
    ) -> StepResult:
        """Take one optimizer step per minibatch, all at `factor` times the peak rates. All ranks call it together.

        Raises:
            ConfigError: a row has tokens or positions that the model does not know.
            RunError: the third step in a row in which every gradient was non-finite.
        """
        rates = self._rates.apply(factor)
        means, losses, norms = Means(), list[float](), list[float]()
        for minibatch in minibatches:
            loss = self._backward(minibatch, objective, means, untouched=not norms)
            norm = self._update(loss)
            if norm is not None:
                losses.append(loss)
                norms.append(norm)
        self._count_lost(bool(norms))
        return StepResult(
            loss=sum(losses) / len(losses) if losses else None,
            grad_norm=sum(norms) / len(norms) if norms else None,
            skipped=len(minibatches) - len(norms),
            means=means.reduce(self._world) | self._policy.routing.reduce(self._world.sum, self._world.device),
            rates=rates,
        )

    @torch.no_grad()
    def evaluate(self, minibatch: Minibatch, objective: Callable[[Scored], Objective]) -> float:
        """Compute the loss of a minibatch and change nothing. All ranks call it together."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for row in minibatch.rows:
            total += objective(self._score(row, minibatch.counts, untouched=True)).loss
            self._on_row()
        for module in self._policy.modules():
            if isinstance(module, FSDPModule):  # no backward pass follows that would give the gathered weights back
                module.reshard()
        return self._world.sum_rows(total).item()

    def _backward(
        self, minibatch: Minibatch, objective: Callable[[Scored], Objective], means: Means, untouched: bool
    ) -> float:
        """Accumulate the gradient of the minibatch, reduced over ranks with the last row; return the loss of all."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for i, row in enumerate(minibatch.rows):
            accumulate(self._policy, last=i == len(minibatch.rows) - 1)
            answer = objective(self._score(row, minibatch.counts, untouched))
            answer.loss.backward()
            total += answer.loss.detach()
            means.add(answer.means)
            self._on_row()
        return self._world.sum_rows(total).item()

    def _score(self, row: MicroBatch, counts: Counts, untouched: bool) -> Scored:
        self._policy.check_row(row)
        row = row.to(self._world.device)
        logprobs, entropy, *left_out = self._policy(row)
        return Scored(row, logprobs, entropy, untouched, counts, *left_out)

    def _update(self, loss: float) -> float | None:
        """Clip the gradient and apply it; return its norm before clipping, None if it or the loss is not finite."""
        norm = gradient_norm(self._policy.parameters(), self._world)
        usable = math.isfinite(norm) and math.isfinite(loss)
        if usable:
            clip_gradients(self._policy.parameters(), norm, self._max_norm)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm if usable else None

    def _count_lost(self, updated: bool) -> None:
        self._lost_steps = 0 if updated else self._lost_steps + 1
        if self._lost_steps >= _LOST_STEPS:
            raise RunError(
                f"the gradient was not finite in {_LOST_STEPS} steps in a row; lower optim.lr, or look at the batches "
                "for non-finite logprobs or advantages"
            )
