"""Which rank copies which piece of which tensor, and who writes which file: the same plan on all ranks, made once.

Every piece of a tensor is copied by one rank, though several may hold it. A rank keeps its pieces in one buffer, in the
order of the files, so that what a file needs of a rank is one stretch of that rank's buffer: one message.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from prime_rl.errors import RunError

_ALIGN = 64
_LEAST_FILE_BYTES = 64 * 2**20
"""A file that would be smaller is not worth a second rank's work."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a piece inside its tensor."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, copied by `rank` to `begin` of its buffer."""

    rank: int
    box: Box
    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor: its whole shape, its type on the host, and its pieces."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file.

    Attributes:
        owner: the rank that writes it.
        blocks: its tensors.
        stretches: by rank, begin and end in that rank's buffer of what the file needs of it.
    """

    owner: int
    blocks: tuple[tuple[Source, ...], ...]
    stretches: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """All files, and how large each rank's buffer is."""

    files: tuple[FilePlan, ...]
    buffer_bytes: tuple[int, ...]

    @property
    def sources(self) -> list[Source]:
        """All tensors in order."""
        return [source for file in self.files for block in file.blocks for source in block]

    @property
    def total_bytes(self) -> int:
        """Of all tensors as they are on the hosts."""
        return sum(math.prod(s.shape) * s.dtype.itemsize for s in self.sources)


def make_plan(
    blocks: Sequence[Sequence[str]],
    tensors: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    gather: Callable[[Any], list[Any]],
    shard_bytes: int,
    single: bool = False,
) -> Plan:
    """Plan the publication of `tensors`. All ranks call it together.

    Args:
        blocks: names; what is in one block goes into one file.
        tensors: as they are sharded, by name.
        dtypes: of their copies.
        gather: returns every rank's object.
        shard_bytes: a file ends when it has reached this size.
        single: everything goes into one file.

    Raises:
        RunError: the ranks' shards of a tensor are not boxes that cover it.
    """
    boxes: list[dict[str, Box]] = gather({name: _my_box(name, tensor) for name, tensor in tensors.items()})
    ends = [0] * len(boxes)
    sizes = {name: math.prod(tensor.shape) * dtypes[name].itemsize for name, tensor in tensors.items()}
    limit = min(shard_bytes, max(_LEAST_FILE_BYTES, math.ceil(sum(sizes.values()) / len(boxes))))
    files = list[FilePlan]()
    for part in [list(blocks)] if single else _cut(blocks, sizes, limit):
        begins = list(ends)
        planned = tuple(
            tuple(_source(name, tensors[name], dtypes[name], [b[name] for b in boxes], ends) for name in block)
            for block in part
        )
        files.append(FilePlan(len(files) % len(boxes), planned, tuple(zip(begins, ends, strict=True))))
    return Plan(tuple(files), tuple(ends))


def view(buffer: Tensor, dtype: torch.dtype, shape: tuple[int, ...], begin: int) -> Tensor:
    """Look at a stretch of a uint8 buffer as a tensor."""
    return buffer[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _cut(blocks: Sequence[Sequence[str]], sizes: Mapping[str, int], limit: int) -> list[list[Sequence[str]]]:
    files, filled = list[list[Sequence[str]]]([[]]), 0
    for block in blocks:
        if filled >= limit:
            files.append([])
            filled = 0
        files[-1].append(block)
        filled += sum(sizes[name] for name in block)
    return files


def _my_box(name: str, tensor: Tensor) -> Box:
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tuple(tensor.to_local().shape)
    if local != tuple(shape):
        raise RunError(f"cannot publish {name}: a shard of {local} where {tuple(shape)} was expected")
    return tuple(offset), local


def _source(name: str, tensor: Tensor, dtype: torch.dtype, boxes: Sequence[Box], ends: list[int]) -> Source:
    """Share the pieces among the ranks that hold them; moves `ends` on."""
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        if math.prod(box[1]):
            holders.setdefault(box, []).append(rank)
    pieces = list[Piece]()
    for box, ranks in holders.items():
        rank = min(ranks, key=lambda rank: ends[rank])
        size = math.prod(box[1]) * dtype.itemsize
        pieces.append(Piece(rank, box, ends[rank], size))
        ends[rank] += -(-size // _ALIGN) * _ALIGN
    _check_cover(name, tensor, list(holders))
    return Source(name, tuple(tensor.shape), dtype, tuple(pieces))


def _check_cover(name: str, tensor: Tensor, boxes: Sequence[Box]) -> None:
    """Raise unless the boxes are the cells of a grid over the tensor: then they cover it, each place once."""
    cuts = [{0, extent} for extent in tensor.shape]
    for offset, shape in boxes:
        for dim, (begin, extent) in enumerate(zip(offset, shape, strict=True)):
            cuts[dim] |= {begin, begin + extent}
    cells = math.prod(len(list(pairwise(cut))) for cut in cuts)
    if sum(math.prod(shape) for _, shape in boxes) != tensor.numel() or (tensor.numel() and cells != len(boxes)):
        raise RunError(f"cannot publish {name}: the shards of its {len(boxes)} ranks do not tile it")
