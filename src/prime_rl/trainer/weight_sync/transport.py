"""Delivery of versions of the weights: the exchange of their pieces between ranks, and the transports that write files.

`FilesystemTransport` writes safetensors files, of which each rank writes some. `DeltaTransport` writes versions as
deltas against the previous one: full, delta, delta, ..., full. `publisher.TRANSPORTS` has all transports by name.
"""

import json
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from prime_rl.configs.training.broadcast import FileBroadcastConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.os_errors import summarize_os_error
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.artifact import fsync
from prime_rl.storage.delta.chain import SUFFIX, DeltaBase
from prime_rl.storage.delta.tensor_codec import encode_delta
from prime_rl.storage.tensor_hashes import SAFETENSORS_NAMES, RawTensor
from prime_rl.trainer.parallel.process_group import RankConsensus, World
from prime_rl.trainer.weight_sync.gather_plan import FilePlan, Plan, PublishedStateDict, SourceTensor, view

Hashes = dict[str, dict[str, str]]
"""File name -> tensor name -> hash."""
_GIB = 2**30
_MAX_DELTA_THREADS = 8


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


class WeightTransport(ABC):
    """Delivers versions of the weights. All ranks make the same calls, for one version after the other.

    Attributes:
        directory: where versions are written, which the run directory then links to; None is the run directory itself.
        bytes_in_memory: size of the latest version, if it is not written to files.
        is_delta: whether the current version is stored as a delta, which needs no config and tokenizer files.
    """

    directory: Path | None = None
    bytes_in_memory = 0
    is_delta = False

    def __init__(self, options: Any, exchange: PieceExchange) -> None:
        """`options` is the configuration of the transport's type. All ranks call it together.

        Raises ConfigError if the transport cannot be used here.
        """
        self._options, self._exchange, self._ranks = options, exchange, exchange.ranks

    @classmethod
    def create(cls, options: Any, exchange: PieceExchange) -> "WeightTransport":
        """Create the transport, or the variant of it that `options` choose."""
        return cls(options, exchange)

    @classmethod  # noqa: B027 (optional)
    def check_device(cls, options: Any, world: World) -> None:
        """Raise ConfigError if the transport does not work on this device; called before the first forward pass."""

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

    def check(self) -> None:  # noqa: B027 (optional)
        """Raise RunError if a version could not be delivered in the background."""

    def close(self) -> None:  # noqa: B027 (optional)
        """Finish what is delivered in the background."""


class FilesystemTransport(WeightTransport):
    """Writes versions as safetensors files.

    Attributes:
        num_versions: how many full versions must fit into the directory: the current one and the one being written.
    """

    num_versions = 2

    def __init__(self, options: FileBroadcastConfig, exchange: PieceExchange) -> None:
        """Check the free space of `options.directory`; raises ConfigError if there is too little."""
        super().__init__(options, exchange)
        self.directory = options.directory
        self._ranks.on_main(self._check_free_space)

    @classmethod
    def create(cls, options: FileBroadcastConfig, exchange: PieceExchange) -> WeightTransport:
        """Create the transport, that of deltas if `options.delta` is set."""
        return (cls if options.delta is None else DeltaTransport)(options, exchange)

    def deliver(self, directory: Path, buffer: Tensor, name: str) -> list[Hashes]:
        """Write the version's files to `directory`; the hashes are by the names of a full version's files."""
        return self._ranks.gather(lambda: self._write_files(directory, buffer))

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Write contiguous CPU tensors to `path`; return their hashes. Raises OSError."""
        return write_safetensors(path, tensors)

    def _check_free_space(self) -> None:
        if self.directory is None:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            raise ConfigError(f"weight_broadcast.directory: {summarize_os_error(error)}") from None
        needed = self.num_versions * sum(math.prod(s.shape) * s.dtype.itemsize for s in self._exchange.plan.sources)
        if free < needed:
            raise ConfigError(
                f"weight_broadcast.directory: {self.directory} has {free / _GIB:.1f} GiB free, but {self.num_versions} "
                f"versions need {needed / _GIB:.1f} GiB; free some space, or omit the key to use the run directory"
            )

    def _write_files(self, directory: Path, buffer: Tensor) -> Hashes:
        hashes: Hashes = {}
        error: RunError | None = None
        plan, world = self._exchange.plan, self._exchange.world
        files = plan.files
        for begin in range(0, len(files), plan.num_writers):
            tensors = self._exchange.collect(files[begin : begin + plan.num_writers], buffer)
            if tensors is None or error is not None:
                continue
            name = self._exchange.state_dict.file_name(begin + world.rank, len(files))
            try:
                hashes[name] = self.write_tensors(directory / name, dict(tensors))
            except (RunError, OSError) as caught:
                if isinstance(caught, OSError):  # an error of write() does not name the file
                    caught = RunError(summarize_os_error(caught, directory / name))
                error = caught
        if error is not None:
            raise error  # only after the last exchange: the other ranks take part in all of them
        return hashes


class DeltaTransport(FilesystemTransport):
    """Writes every `full_interval`-th version in full, and the others as deltas.

    Every rank keeps a copy of the tensors that it wrote. The copy becomes the base of the next delta when its version
    is complete; after an error the next version is therefore full.
    """

    num_versions = 3  # two full versions, and the deltas between them

    def __init__(self, options: FileBroadcastConfig, exchange: PieceExchange) -> None:
        super().__init__(options, exchange)
        assert options.delta is not None
        self._interval = options.delta.full_interval
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", exchange.world.size))
        self._threads = min(_MAX_DELTA_THREADS, max(1, (os.cpu_count() or 1) // 2 // local_ranks))
        self._kept: dict[str, dict[str, RawTensor]] = {}
        self._hashes: dict[str, dict[str, str]] = {}
        self._complete: DeltaBase | None = None
        self._base: DeltaBase | None = None
        self._current: DeltaBase | None = None
        self._is_last = False
        self._since_full = 0

    def begin(self, name: str, version: PolicyVersion, last: bool) -> None:
        """Decide whether the version becomes a delta."""
        as_delta = not last and self._since_full + 1 < self._interval
        self._base, self._complete = self._complete if as_delta else None, None
        self._current, self._is_last = DeltaBase(name, version, hash=""), last
        self.is_delta = self._base is not None

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Write the tensors to `path`, or their delta beside it; return the hashes of the tensors.

        Raises OSError, or RunError if the kept copy of the base is not what was published.
        """
        raw = raw_tensors(tensors)
        if self._base is None:
            hashes = super().write_tensors(path, tensors)
        else:
            hashes = self._write_delta(path, raw, self._base)
        if not self._is_last:
            kept = self._kept.setdefault(path.stem, {})
            for name, new in raw.items():
                if name in kept:
                    np.copyto(kept[name].data, new.data)
                else:
                    kept[name] = RawTensor(new.dtype, new.shape, new.data.copy())
            self._hashes[path.stem] = hashes
        return hashes

    def manifest_fields(self) -> dict[str, Any]:
        """Describe the base of a delta; None for a full version that deltas may follow."""
        if self._is_last:
            return {}
        if self._base is None:
            return {"delta": {"base": None}}
        return {"delta": {"base": self._base.name, **asdict(self._base.version), "hash": self._base.hash}}

    def complete(self, content_hash: str) -> None:
        """Make the version the base of the next delta."""
        assert self._current is not None
        self._since_full = 0 if self._base is None else self._since_full + 1
        self._complete = None if self._is_last else replace(self._current, hash=content_hash)

    def _write_delta(self, path: Path, tensors: Mapping[str, RawTensor], base: DeltaBase) -> dict[str, str]:
        assert self._current is not None
        path = path.with_suffix(SUFFIX)
        kept, version = self._kept[path.stem], self._current.version
        delta = encode_delta(kept, tensors, path, base.version, version, self._threads)
        fsync(path)
        if {name: entry.base for name, entry in delta.entries.items()} != self._hashes[path.stem]:
            raise RunError(
                f"the copy of {base.name} in memory is not what was published; check this machine's memory for errors"
            )
        return delta.hashes


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


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write contiguous CPU tensors to `path` and fsync it, without a second copy in memory; return hashes by name."""
    raw = raw_tensors(tensors)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in raw.items():
        begin, end = end, end + tensor.data.size
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    hashes = {}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in raw.items():
            file.write(tensor.data.data)
            hashes[name] = tensor.digest(name)
    fsync(path)
    return hashes


def write_index(directory: Path, hashes: Hashes) -> None:
    """Write the index that transformers and vLLM read for several files."""
    if len(hashes) > 1:
        total = sum((directory / name).stat().st_size for name in hashes)
        weight_map = {tensor: name for name in sorted(hashes) for tensor in hashes[name]}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
