"""The plan of a publication: which rank copies which piece of each tensor, and which rank writes which file.

Each piece is copied by one rank to its host buffer, in the order of the files, so that a file needs one contiguous
range (one message) of each rank.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from prime_rl.core.errors import RunError
from prime_rl.core.page_locked_memory import lock_pages
from prime_rl.trainer.checkpoints.rank_consensus import RankConsensus
from prime_rl.trainer.parallel.dtensor_slices import local_tensor
from prime_rl.trainer.weight_sync.published_state_dict import PublishedStateDict

_ALIGN = 64
_LEAST_FILE_BYTES = 64 * 2**20
"""Smaller files are not split among ranks."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a piece in its tensor."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, copied by `rank` to offset `begin` of its buffer."""

    rank: int
    box: Box
    begin: int


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor: its full shape, its dtype on the host, and its pieces."""

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
        ranges: by rank, begin and end of the file's data in that rank's buffer.
    """

    owner: int
    blocks: tuple[tuple[SourceTensor, ...], ...]
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """All files, the number of ranks that write them (the first ones), and the size of each rank's buffer."""

    files: tuple[FilePlan, ...]
    num_writers: int
    buffer_bytes: tuple[int, ...]

    @property
    def sources(self) -> list[SourceTensor]:
        """All tensors, in order."""
        return [source for file in self.files for block in file.blocks for source in block]


def make_plan(
    state_dict: PublishedStateDict, ranks: RankConsensus, shard_bytes: int, num_writers: int | None = None
) -> Plan:
    """Plan the publication of the tensors of `state_dict`, by all ranks or the first `num_writers`.

    All ranks call it together.

    A file ends when it reaches `shard_bytes`; the tensors of one block, and all of an adapter, go into one file.

    Raises:
        RunError: the ranks' shards do not cover a tensor.
    """
    tensors, blocks = state_dict.tensors(), state_dict.blocks
    dtypes = {name: state_dict.host_dtype(name, tensor) for name, tensor in tensors.items()}
    boxes = ranks.gather(lambda: {name: _my_box(name, tensor) for name, tensor in tensors.items()})
    ends = [0] * len(boxes)
    sizes = {name: math.prod(tensor.shape) * dtypes[name].itemsize for name, tensor in tensors.items()}
    num_writers = num_writers or len(boxes)
    limit = min(shard_bytes, max(_LEAST_FILE_BYTES, math.ceil(sum(sizes.values()) / num_writers)))
    files = list[FilePlan]()
    for part in [blocks] if state_dict.adapters_alone else _cut(blocks, sizes, limit):
        begins = list(ends)
        planned = tuple(
            tuple(_source(name, tensors[name], dtypes[name], [b[name] for b in boxes], ends) for name in block)
            for block in part
        )
        files.append(FilePlan(len(files) % num_writers, planned, tuple(zip(begins, ends, strict=True))))
    return Plan(tuple(files), num_writers, tuple(ends))


def view(buffer: Tensor, dtype: torch.dtype, shape: tuple[int, ...], begin: int) -> Tensor:
    """View a range of a uint8 buffer as a tensor."""
    return buffer[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class HostSnapshot:
    """This rank's pieces of a version in host memory, in the published dtype; the buffer is reused for every version.

    The copy runs on a CUDA stream or in the writer thread while the next forward and backward run. It must be complete
    before the next update (`Publisher.guard`).

    Attributes:
        buffer: uint8, page-locked if the weights are on CUDA.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        """Allocate the memory; `device` is the rank's compute device."""
        self.buffer = torch.empty(plan.buffer_bytes[rank], dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._stream, self._copied = torch.cuda.Stream(device), torch.cuda.Event()
            lock_pages(self.buffer)
        else:
            self.buffer.zero_()  # allocates the pages before the first version
        self._targets = {
            source.name: view(self.buffer, source.dtype, piece.box[1], piece.begin)
            for source in plan.sources
            for piece in source.pieces
            if piece.rank == rank
        }

    def enqueue(self, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Start copying the tensors on CUDA, after all work that is queued there.

        Returns:
            Pairs of target and shard for the tensors on the CPU, which the caller copies.
        """
        shards = {name: local_tensor(tensor) for name, tensor in tensors.items() if name in self._targets}
        on_host = [(self._targets[name], shard) for name, shard in shards.items() if not shard.is_cuda]
        if self._stream is not None and self._copied is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for name, shard in shards.items():
                    if shard.is_cuda:
                        # Cast on the device first: half the bytes cross the bus.
                        self._targets[name].copy_(shard.to(self._targets[name].dtype), non_blocking=True)
                self._copied.record(self._stream)
        return on_host

    def delay_device_work(self) -> None:
        """Make CUDA work that is queued after this call wait for the copy; does not block the caller."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def finish(self) -> None:
        """Wait until the copy that `enqueue` started is complete."""
        if self._copied is not None:
            self._copied.synchronize()


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
        raise RunError(f"cannot publish {name}: its shard has shape {local}, expected {tuple(shape)}")
    return tuple(offset), local


def _source(name: str, tensor: Tensor, dtype: torch.dtype, boxes: Sequence[Box], ends: list[int]) -> SourceTensor:
    """Distribute the pieces among the ranks that hold them; advances `ends`."""
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        if math.prod(box[1]):
            holders.setdefault(box, []).append(rank)
    pieces = list[Piece]()
    for box, ranks in holders.items():
        rank = min(ranks, key=lambda rank: ends[rank])
        pieces.append(Piece(rank, box, ends[rank]))
        ends[rank] += math.ceil(math.prod(box[1]) * dtype.itemsize / _ALIGN) * _ALIGN
    _check_cover(name, tensor, list(holders))
    return SourceTensor(name, tuple(tensor.shape), dtype, tuple(pieces))


def _check_cover(name: str, tensor: Tensor, boxes: Sequence[Box]) -> None:
    """Raise unless the boxes are the cells of a grid over the tensor, which covers each element once."""
    cuts = [{0, extent} for extent in tensor.shape]
    for offset, shape in boxes:
        for dim, (begin, extent) in enumerate(zip(offset, shape, strict=True)):
            cuts[dim] |= {begin, begin + extent}
    cells = math.prod(len(list(pairwise(cut))) for cut in cuts)
    if sum(math.prod(shape) for _, shape in boxes) != tensor.numel() or (tensor.numel() and cells != len(boxes)):
        raise RunError(f"cannot publish {name}: its {len(boxes)} shards do not tile it")
