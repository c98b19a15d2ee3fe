"""The part of a tensor that this rank holds, in every layout (I9): FSDP, hybrid, tensor and expert parallelism."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

Ranges = list[tuple[int, int]]
"""Half-open ranges of indices along one dimension, in the order of the local tensor."""


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a distributed tensor; a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_ranges(tensor: Tensor) -> list[Ranges]:
    """Return, per dimension of the whole tensor, the indices that this rank holds; all of them for a plain tensor.

    Raises ValueError if a placement is a partial sum.
    """
    ranges = [[(0, size)] for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return ranges
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh has no part of the tensor"
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim"):
            raise ValueError(f"cannot fill a tensor with placements {tensor.placements}")
        dim, ranks, rank = placement.dim % tensor.ndim, tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim]
        # A strided shard holds a part of each of several groups: FSDP's part of what tensor parallelism split.
        groups = 1 if type(placement) is Shard else int(getattr(placement, "split_factor", 1))
        parts = [_chunk(ranges[dim], groups, i) for i in range(groups)]
        ranges[dim] = [piece for part in parts for piece in _chunk(part, ranks, rank)]
    held = [sum(stop - start for start, stop in dim) for dim in ranges]
    if held != list(tensor.to_local().shape) and 0 not in held:
        raise ValueError(f"expected a part of {list(tensor.to_local().shape)}, placements give {held}")
    return ranges


def read_ranges(source: Any, ranges: Sequence[Ranges]) -> Tensor:
    """Concatenate the ranges of `source`, a tensor or a lazily read one."""

    def cut(chosen: tuple[slice, ...]) -> Tensor:
        if len(chosen) == len(ranges):
            return source[chosen or ...]
        parts = [cut((*chosen, slice(*one))) for one in ranges[len(chosen)]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, len(chosen))

    return cut(())


@torch.no_grad()
def fill_tensor(target: Tensor, source: Any, ranges: Sequence[Ranges] | None = None) -> None:
    """Copy this rank's part of `source`, which has the shape of the whole `target`, into `target`.

    Dtypes and devices may differ. Only `ranges` of `source` are read, by default `local_ranges(target)`.
    """
    local = local_tensor(target)
    if local.numel():
        local.copy_(read_ranges(source, local_ranges(target) if ranges is None else ranges))


def _chunk(ranges: Ranges, count: int, index: int) -> Ranges:
    """Return chunk `index` of `count`, as `torch.chunk` divides the concatenated ranges."""
    total = sum(stop - start for start, stop in ranges)
    size = -(-total // count)
    begin, end = min(index * size, total), min((index + 1) * size, total)
    taken, passed = [], 0
    for start, stop in ranges:
        low, high = max(begin - passed, 0), min(end - passed, stop - start)
        if low < high:
            taken.append((start + low, start + high))
        passed += stop - start
    return taken
