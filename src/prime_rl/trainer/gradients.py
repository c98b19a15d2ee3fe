"""I9 world size is invisible: gradients on whatever meshes are summed over ranks once, have one norm and one clip."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from prime_rl.trainer.parallel import World


def accumulate(policy: nn.Module, last: bool) -> None:
    """Say whether the next backward pass is the last before the optimizer: only that one reduces gradients."""
    assert isinstance(policy, FSDPModule)
    policy.set_requires_gradient_sync(last)


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], world: World) -> float:
    """2-norm of all gradients, each element counted once however many ranks hold it; equal on all ranks."""
    held: dict[tuple[int, torch.device], list[Tensor]] = defaultdict(list)
    for gradient in _gradients(parameters):
        local = _local(gradient)
        held[_holders(gradient, world), local.device].append(local)
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for (holders, _), gradients in held.items():
        total += get_total_norm(gradients).to(total).square_() / holders
    return world.sum(total).sqrt_().item()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients, whose norm is `norm`, so that it is `max_norm` at most."""
    if norm > max_norm:
        torch._foreach_mul_([_local(gradient) for gradient in _gradients(parameters)], max_norm / (norm + 1e-6))


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _holders(gradient: Tensor, world: World) -> int:
    """How many ranks hold the same elements."""
    if not isinstance(gradient, DTensor):
        return world.size
    placed = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    parts = [size for size, placement in placed if not placement.is_replicate()]
    return world.size // torch.Size(parts).numel()
