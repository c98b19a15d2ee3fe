"""Base class of the ways a version of the weights leaves the trainer, and the exchange of its pieces between ranks."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prime_rl.core.types import PolicyVersion
from prime_rl.storage.tensor_hashes import SAFETENSORS_NAMES, RawTensor
from prime_rl.trainer.checkpoints.rank_consensus import RankConsensus
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.weight_sync.gather_plan import FilePlan, Plan, SourceTensor, view
from prime_rl.trainer.weight_sync.published_state_dict import PublishedStateDict

Hashes = dict[str, dict[str, str]]
"""File name -> tensor name -> hash."""


@dataclass(frozen=True, slots=True)
class PieceExchange:
    """Brings the pieces of each file from the ranks that copied them to the rank that owns the file.

    Attributes:
        plan: the files and their pieces.
        state_dict: converts whole tensors to the published ones.
        world: the ranks.
        ranks: raises errors of one rank on all.
        group: all ranks; used by nothing else at the same time.
    """

    plan: Plan
    state_dict: PublishedStateDict
    world: World
    ranks: RankConsensus
    group: dist.ProcessGroup

    def collect(self, files: Sequence[FilePlan], buffer: Tensor) -> Iterator[tuple[str, Tensor]] | None:
        """Send each owner its range of this rank's `buffer`, and receive the ranges for this rank's own file.

        All ranks call it together. No two of the `files` have the same owner.

        Returns:
            Names and published tensors of this rank's file, assembled one block at a time; None if it owns no file.
        """
        rank, own, pending = self.world.rank, None, list[dist.Work | None]()
        ranges: dict[int, tuple[Tensor, int]] = {}  # by rank: its range, and the offset of the range in its buffer
        for file in files:
            begin, end = file.ranges[rank]
            if file.owner != rank:
                if end > begin:
                    pending.append(dist.isend(buffer[begin:end], file.owner, group=self.group))
                continue
            own, ranges[rank] = file, (buffer[begin:end], begin)
            for source, (begin, end) in enumerate(file.ranges):
                if source != rank and end > begin:
                    ranges[source] = (torch.empty(end - begin, dtype=torch.uint8), begin)
                    pending.append(dist.irecv(ranges[source][0], source, group=self.group))
        for work in pending:
            if work is not None:
                work.wait()
        return None if own is None else self._assemble(own, ranges)

    def _assemble(self, file: FilePlan, ranges: Mapping[int, tuple[Tensor, int]]) -> Iterator[tuple[str, Tensor]]:
        for block in file.blocks:
            whole = {source.name: _whole(source, ranges) for source in block}
            for name, tensor in self.state_dict.convert(whole).items():
                yield name, tensor.contiguous()


class WeightTransport(ABC):
    """Delivers versions of the weights. All ranks make the same calls, for one version after the other.

    Attributes:
        bytes_in_memory: size of the latest version, if it is not written to files.
        is_delta: whether the current version is stored as a delta, which needs no config and tokenizer files.
    """

    bytes_in_memory = 0
    is_delta = False

    def __init__(self, exchange: PieceExchange) -> None:
        self._exchange, self._ranks = exchange, exchange.ranks

    def begin(self, name: str, version: PolicyVersion, last: bool) -> None:  # noqa: B027 (optional)
        """Start a version that is published as `name`; no version follows the `last`."""

    @abstractmethod
    def deliver(self, directory: Path, buffer: Tensor, name: str) -> list[Hashes]:
        """Deliver the version `name`, and return the hashes by rank. Raises the same RunError on every rank.

        Args:
            directory: of the version, not yet committed.
            buffer: this rank's pieces.
            name: for messages.
        """

    def manifest_fields(self) -> dict[str, Any]:
        """Return the fields that this transport adds to the manifest of the version. Called on rank 0."""
        return {}

    def complete(self, content_hash: str) -> None:  # noqa: B027 (optional)
        """Record that the version is published with this hash."""


def raw_tensors(tensors: Mapping[str, Tensor]) -> dict[str, RawTensor]:
    """View contiguous CPU tensors as bytes, those with the largest elements first, which keeps all of them aligned."""
    return {
        name: RawTensor(
            SAFETENSORS_NAMES[str(t.dtype).removeprefix("torch.")],
            tuple(t.shape),
            t.reshape(-1).view(torch.uint8).numpy(),
        )
        for name, t in sorted(tensors.items(), key=lambda item: -item[1].element_size())
    }


def _whole(source: SourceTensor, ranges: Mapping[int, tuple[Tensor, int]]) -> Tensor:
    """Assemble the pieces; a single piece is a view of the buffer."""
    whole: Tensor | None = None
    for piece in source.pieces:
        data, begin = ranges[piece.rank]
        part = view(data, source.dtype, piece.box[1], piece.begin - begin)
        if piece.box[1] == source.shape:
            return part
        whole = torch.empty(source.shape, dtype=source.dtype) if whole is None else whole
        whole[tuple(slice(at, at + extent) for at, extent in zip(*piece.box, strict=True))] = part
    return torch.empty(source.shape, dtype=source.dtype) if whole is None else whole
