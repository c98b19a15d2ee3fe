"""Which part of a tensor is this rank's (I9).

Whatever fills a sharded policy goes through here, so that in every layout (FSDP, hybrid, tensor and expert parallel)
each rank holds its part of one and the same whole tensor.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

Runs = list[tuple[int, int]]
"""Half-open ranges of indices along one dimension, in the order in which the rank holds them."""


def local_runs(tensor: Tensor) -> list[Runs]:
    """Say, per dimension of the whole tensor, which indices this rank holds; all of them for a plain tensor.

    Raises:
        ValueError: the placements do not say what the rank holds (partial sums).
    """
    runs = [[(0, size)] for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return runs
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh has no part of the tensor"
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim"):
            raise ValueError(f"a tensor placed {tensor.placements} cannot be filled")
        dim, ranks, rank = placement.dim % tensor.ndim, tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim]
        # A strided shard takes its part of each of several groups: FSDP's share of what tensor parallelism split.
        groups = 1 if type(placement) is Shard else int(getattr(placement, "split_factor", 1))
        runs[dim] = [run for group in _chunks(runs[dim], groups) for run in _chunk(group, ranks, rank)]
    held = [sum(stop - start for start, stop in dim) for dim in runs]
    if held != list(tensor.to_local().shape) and 0 not in held:
        raise ValueError(f"expected a part of {list(tensor.to_local().shape)}, placements give {held}")
    return runs


def read_runs(source: Any, runs: Sequence[Runs]) -> Tensor:
    """Cut the runs out of `source`, a tensor or a lazily read one, and lay them together."""

    def cut(chosen: tuple[slice, ...]) -> Tensor:
        if len(chosen) == len(runs):
            part: Tensor = source[chosen or ...]
            return part
        parts = [cut((*chosen, slice(*run))) for run in runs[len(chosen)]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, len(chosen))

    return cut(())


@torch.no_grad()
def fill(target: Tensor, source: Any, runs: Sequence[Runs] | None = None) -> None:
    """Copy this rank's part of the whole tensor `source` into `target`, whatever the two dtypes and devices are.

    Args:
        target: a parameter or buffer, plain or distributed.
        source: of the shape of the whole `target`; sliced, so that nothing else of it is read.
        runs: what to cut out of `source`; by default what `local_runs(target)` says.
    """
    local = target.to_local() if isinstance(target, DTensor) else target
    if local.numel():
        local.copy_(read_runs(source, local_runs(target) if runs is None else runs))


def _chunks(runs: Runs, count: int) -> list[Runs]:
    return [_chunk(runs, count, i) for i in range(count)]


def _chunk(runs: Runs, count: int, index: int) -> Runs:
    """Take chunk `index` of `count` as `torch.chunk` cuts them, of the indices that the runs list one after another."""
    total = sum(stop - start for start, stop in runs)
    size = -(-total // count)
    begin, end = min(index * size, total), min((index + 1) * size, total)
    taken, passed = [], 0
    for start, stop in runs:
        low, high = max(begin - passed, 0), min(end - passed, stop - start)
        if low < high:
            taken.append((start + low, start + high))
        passed += stop - start
    return taken
