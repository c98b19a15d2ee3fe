"""Reduction, norm and clipping of gradients on any meshes (I9)."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from prime_rl.trainer.parallel.dtensor_slices import local_tensor
from prime_rl.trainer.parallel.process_group import World


def set_gradient_reduction(policy: nn.Module, last: bool, once: bool) -> None:
    """Choose how the next backward pass, the `last` before the optimizer step or not, reduces its gradients.

    Every pass reduces them over the shards, and the last pass also over the replicas. With `once` only the last pass
    reduces, and until then each rank holds whole gradients.
    """
    assert isinstance(policy, FSDPModule)
    policy.set_requires_gradient_sync(last or not once)
    policy.set_requires_all_reduce(last)


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], world: World) -> float:
    """Return the 2-norm of all gradients, equal on all ranks; elements that several ranks hold count once."""
    held: dict[tuple[int, torch.device], list[Tensor]] = defaultdict(list)
    for gradient in _gradients(parameters):
        local = local_tensor(gradient)
        held[num_copies(gradient, world), local.device].append(local)
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for (holders, _), gradients in held.items():
        total += get_total_norm(gradients).to(total).square_() / holders
    return world.sum(total).sqrt_().item()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients, whose norm is `norm`, to a norm of at most `max_norm`."""
    if norm > max_norm:
        torch._foreach_mul_([local_tensor(gradient) for gradient in _gradients(parameters)], max_norm / (norm + 1e-6))


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def num_copies(gradient: Tensor, world: World) -> int:
    """Return the number of ranks that hold the same elements."""
    if not isinstance(gradient, DTensor):
        return world.size
    placed = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    parts = [size for size, placement in placed if not placement.is_replicate()]
    return world.size // torch.Size(parts).numel()
