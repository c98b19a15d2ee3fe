"""The step engine that reinforcement learning and supervised fine-tuning share.

I9 world size is invisible: a rank's loss is scaled by world / N, N being the trained tokens of the whole minibatch on
all ranks; FSDP averages gradients over ranks, and what remains is the sum over all tokens divided by N.
I10 finite: a minibatch with a non-finite gradient or loss takes no optimizer step and is counted; three steps in a row
without a single update end the run.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from prime_rl.errors import RunError
from prime_rl.trainer.means import Means, Weighted
from prime_rl.trainer.micro_batch import MicroBatch
from prime_rl.trainer.model import PolicyModel
from prime_rl.trainer.optim import LearningRates
from prime_rl.trainer.parallel import World, accumulate

_LOST_STEPS = 3


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one optimizer step trains on.

    Attributes:
        rows: this rank's micro-batches; every rank has equally many, at least one.
        normaliser: N, the trained tokens in the rows of all ranks, at least 1.
    """

    rows: Sequence[MicroBatch]
    normaliser: int


@dataclass(frozen=True, slots=True)
class Scored:
    """One row after the forward pass.

    Attributes:
        row: the micro-batch, on the device.
        logprobs: float32 [T], differentiable, 0 outside the mask.
        entropy: float32 [T], 0 outside the mask.
        untouched: the weights are still those the step began with: no optimizer step was taken yet.
    """

    row: MicroBatch
    logprobs: Tensor
    entropy: Tensor
    untouched: bool


@dataclass(frozen=True, slots=True)
class Objective:
    """What an objective answers for one row.

    Attributes:
        loss: scalar, summed over the row's tokens.
        means: sums and counts of what is reported; the same names for every row.
    """

    loss: Tensor
    means: dict[str, Weighted]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did, equal on all ranks.

    Attributes:
        loss: mean over the minibatches of loss / N; None if every one was skipped.
        grad_norm: mean over the minibatches of the norm before clipping; None if every one was skipped.
        skipped: minibatches whose gradient or loss was not finite, which took no optimizer step.
        means: what the objective reported, as means; None where nothing was counted.
        rates: the learning rates that were used, `lr` and `lr/<role>`.
    """

    loss: float | None
    grad_norm: float | None
    skipped: int
    means: dict[str, float | None]
    rates: dict[str, float]


class Engine:
    """Forward, backward and update over minibatches of packed rows."""

    def __init__(self, policy: PolicyModel, optimizer: Optimizer, world: World, max_norm: float | None) -> None:
        """Take a sharded policy and the optimizer over its parameters; `max_norm` None does not clip."""
        self._policy, self._optimizer, self._world = policy, optimizer, world
        self._max_norm = float("inf") if max_norm is None else max_norm
        self._rates = LearningRates(optimizer)
        self._lost_steps = 0

    def step(
        self, minibatches: Sequence[Minibatch], objective: Callable[[Scored], Objective], factor: float
    ) -> StepResult:
        """Take one optimizer step per minibatch, all at `factor` times the peak rates. All ranks call it together.

        Raises:
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
            means=means.reduce(self._world),
            rates=rates,
        )

    def _backward(
        self, minibatch: Minibatch, objective: Callable[[Scored], Objective], means: Means, untouched: bool
    ) -> float:
        """Accumulate the gradient of the minibatch, reduced over ranks with the last row; return the loss of all."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for i, row in enumerate(minibatch.rows):
            accumulate(self._policy, last=i == len(minibatch.rows) - 1)
            row = row.to(self._world.device)
            logprobs, entropy = self._policy(row)
            answer = objective(Scored(row, logprobs, entropy, untouched))
            (answer.loss * (self._world.size / minibatch.normaliser)).backward()
            total += answer.loss.detach()
            means.add(answer.means)
        return self._world.sum(total).item() / minibatch.normaliser

    def _update(self, loss: float) -> float | None:
        """Clip the gradient and apply it; return its norm before clipping, None if it or the loss is not finite."""
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._max_norm)
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        usable = math.isfinite(value) and math.isfinite(loss)
        if usable:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return value if usable else None

    def _count_lost(self, updated: bool) -> None:
        self._lost_steps = 0 if updated else self._lost_steps + 1
        if self._lost_steps >= _LOST_STEPS:
            raise RunError(
                f"the gradient was not finite in {_LOST_STEPS} steps in a row; lower optim.lr, or look at the batches "
                "for non-finite logprobs or advantages"
            )
