"""Forward, backward and update of several models over one frozen policy.

A model is {adapter, optimizer, accumulated gradients}. The base weights exist once, sharded by FSDP; adapters are whole
on every rank, so the ranks may work on rows of different models in the same pass. Gradients stay on the rank of the row
until the model's update, which sums them over the ranks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from prime_rl.trainer.fsdp import reshard_policy
from prime_rl.trainer.micro_batch import PADDING_ROW, assign_rows
from prime_rl.trainer.model.lora import Adapter
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.parallel.process_group import World


@dataclass(frozen=True, slots=True)
class Job:
    """Rows of one model for a forward pass, and a backward pass."""

    adapter: Adapter
    costs: Sequence[float]  # of the rows, to balance the ranks
    # The differentiable loss of a row, a scalar; None is a padding row, whose loss is 0 and depends on the policy.
    loss: Callable[[PolicyModel, int | None], Tensor]
    # Scores a row before `loss`, without an adapter and without gradients, by one forward pass.
    score_reference: Callable[[PolicyModel, int | None], object] | None = None


def run_jobs(
    policy: PolicyModel,
    world: World,
    jobs: Sequence[Job],
    backward: bool = True,
    on_row: Callable[[], None] = lambda: None,
    turn: int = 0,
) -> None:
    """Run all rows of the jobs, divided over the ranks by cost; add their gradients, or run the forward pass alone.

    All ranks call it together with the same jobs; `Job.loss` is called for the rows of this rank, `on_row` after each;
    `turn` as in `assign_rows`.
    """
    rows = [(job, row) for job in jobs for row in range(len(job.costs))]
    references = [job.score_reference for job in jobs if job.score_reference is not None]
    assigned = assign_rows([job.costs[row] for job, row in rows], world.data_size, turn)
    for index in assigned[world.data_rank]:
        job, row = (jobs[0], None) if index == PADDING_ROW else rows[index]
        if references:  # all ranks run the same passes, also for rows that need no reference
            with torch.no_grad():
                (job.score_reference or references[0])(policy, row if job.score_reference else None)
        with job.adapter.activate(), torch.set_grad_enabled(backward):
            loss = job.loss(policy, row)
            if backward:
                loss.backward()
        on_row()
    reshard_policy(policy)


@torch.no_grad()
def sum_gradients(adapter: Adapter, world: World) -> float:
    """Sum the adapter's gradients over the ranks, in place; return their 2-norm. All ranks call it together.

    A factor without a gradient on this rank gets zeros.
    """
    for factor in adapter.parameters:
        if factor.grad is None:
            factor.grad = torch.zeros_like(factor)
    gradients = [factor.grad for factor in adapter.parameters if factor.grad is not None]
    if world.size > 1:
        summed = world.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = summed.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])
    return get_total_norm(gradients).item()


@torch.no_grad()
def update(adapter: Adapter, optimizer: Optimizer, norm: float, max_norm: float = math.inf) -> bool:
    """Clip the summed gradients, whose norm is `norm`, and apply them if they are finite; then discard them.

    Returns whether they were applied (I10).
    """
    if usable := math.isfinite(norm):
        if norm > max_norm:
            torch._foreach_mul_([factor.grad for factor in adapter.parameters], max_norm / (norm + 1e-6))
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return usable
