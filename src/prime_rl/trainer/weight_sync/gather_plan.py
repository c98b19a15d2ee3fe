"""The plan of a publication: which rank copies which piece of each tensor, and which rank writes which file.

Each piece is copied by one rank to its host buffer, in the order of the files, so that a file needs one contiguous
range (one message) of each rank. `PublishedStateDict` lists the tensors and converts them to their published form.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from prime_rl.core.errors import RunError
from prime_rl.core.page_locked_memory import lock_pages
from prime_rl.trainer.model.lora import AdaptedLinear, ExpertsAdapter, adapted_experts, adapted_layers
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.parallel.device_mesh import local_tensor
from prime_rl.trainer.parallel.process_group import RankConsensus
from prime_rl.trainer.weights.adapter_files import ADAPTER_WEIGHTS, adapter_config, peft_name

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


class PublishedStateDict:
    """Lists the policy's tensors and converts them to those of a version: a model, merged weights, or an adapter.

    Conversion works block by block: transformers stores some weights differently from their checkpoints (fused
    experts), but never across blocks.

    Attributes:
        blocks: names of the tensors, block by block, the same on all ranks.
        adapters_alone: the version is an adapter, not a model.
    """

    def __init__(self, policy: PolicyModel, dtype: torch.dtype) -> None:
        """List the tensors of a sharded policy; `dtype` is that of the published floating-point tensors."""
        self._policy, self._dtype = policy, dtype
        linear, experts = adapted_layers(policy), adapted_experts(policy)
        self._linear = linear
        self._adapted: dict[str, AdaptedLinear | ExpertsAdapter] = {**linear, **experts}
        self._weights = {name: f"{name}.weight" for name in linear}
        self._weights |= {name: name.removesuffix(ExpertsAdapter.ENDING) for name in experts}
        self.adapters_alone = any(layer.config.publish == "adapter" for layer in self._adapted.values())
        self._needs_no_conversion = getattr(policy.causal_lm, "_weight_conversions", None) == []
        # An adapter is added in full precision; only the sum is cast to the published dtype.
        factors = {name: _factors(name) for name in self._adapted}
        self._exact = {
            one for name in factors if not self.adapters_alone for one in (self._weights[name], *factors[name])
        }
        self.blocks = [*factors.values()] if self.adapters_alone else self._model_blocks()

    def tensors(self) -> dict[str, Tensor]:
        """Return the current tensors of all blocks: DTensors, and plain tensors that are equal on all ranks."""
        state = _state(self._policy)
        return {name: state[name].detach() for names in self.blocks for name in names}

    def host_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which a tensor is copied to the host."""
        return self._dtype if tensor.is_floating_point() and name not in self._exact else tensor.dtype

    def convert(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the full tensors of a block to the published tensors and names."""
        if self.adapters_alone:
            return {peft_name(*name.rsplit(".", 2)[:2]): tensor for name, tensor in whole.items()}
        merged = {name: tensor for name, tensor in whole.items() if name not in self._exact}
        for name, weight in self._weights.items():
            if weight in whole:
                a, b = (whole[factor] for factor in _factors(name))
                merged[weight] = self._adapted[name].merge(whole[weight], a, b).to(self._dtype)
        ordered = {name: merged[name] for name in whole if name in merged}
        return ordered if self._needs_no_conversion else revert_weight_conversion(self._policy.causal_lm, ordered)

    def file_name(self, number: int, count: int) -> str:
        """Return the name of the file `number` of `count`, from 0."""
        if self.adapters_alone:
            return ADAPTER_WEIGHTS
        return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def companions(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
        """Return the files of config (with the published dtype) and tokenizer, or of an adapter's config."""
        if self.adapters_alone:
            return adapter_config(self._policy, self._linear)
        causal_lm = self._policy.causal_lm
        with tempfile.TemporaryDirectory() as scratch:
            before = causal_lm.config.dtype
            causal_lm.config.dtype = self._dtype
            causal_lm.config.save_pretrained(scratch)
            causal_lm.config.dtype = before
            if causal_lm.generation_config is not None:
                causal_lm.generation_config.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            return {path.name: path.read_bytes() for path in sorted(Path(scratch).iterdir()) if path.is_file()}

    def _model_blocks(self) -> list[list[str]]:
        """Split by the number in the name (`model.layers.7.`); a name without a number is a block."""
        of_weight = {weight: _factors(name) for name, weight in self._weights.items()}
        factors = {factor for pair in of_weight.values() for factor in pair}
        blocks: dict[str, list[str]] = {}
        for name in _state(self._policy):
            if name not in factors:
                parts = name.split(".")
                number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
                blocks.setdefault(".".join(parts[: number + 1]), []).extend([name, *of_weight.get(name, [])])
        return list(blocks.values())


def _factors(layer: str) -> list[str]:
    return [f"{layer}.{factor}.weight" for factor in ("lora_A", "lora_B")]


def _state(policy: PolicyModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tied output head is listed once."""
    causal_lm = policy.causal_lm
    parameters = dict(causal_lm.named_parameters())
    with_tied = {name for name, _ in causal_lm.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in causal_lm.state_dict().items() if name not in with_tied}
    return {**parameters, **buffers}


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
