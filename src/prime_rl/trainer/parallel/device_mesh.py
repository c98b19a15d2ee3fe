"""The layout of the ranks over the kinds of parallelism, their device meshes, and the part of a tensor on each (I9).

Collectives with gradients are for computations that several ranks share. The backward pass of each one is the
transposed map: a sum for a copy, a split for a gather, and the other way round.

Context parallelism uses them: several ranks share one packed row; loss and gradients do not change (I9). Each rank
holds a contiguous slice of the row's tokens. An all-to-all around the attention of every layer converts slices of
tokens with all heads into all tokens with some of the heads, and back (DeepSpeed-Ulysses, Jacobs et al. 2023,
arXiv:2309.14509). Each rank scores the tokens that its slice predicts; the sum over the ranks is the whole row. Every
rank then computes the same loss and keeps the gradient of its own slice.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor, Shard

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.trainer.micro_batch import MicroBatch

Ranges = list[tuple[int, int]]
"""Half-open ranges of indices along one dimension, in the order of the local tensor."""
_Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the dimensions; the product of `replicate`, `shard`, `cp` and `tp` is the number of ranks."""

    replicate: int  # number of replicas of the sharded model
    shard: int  # number of ranks that shard a replica, without those of `cp`
    cp: int  # number of ranks that share each row
    tp: int  # number of ranks that share each matrix
    ep: int  # number of ranks, of those of `shard` and `cp`, that divide the experts

    @classmethod
    def of(cls, config: TrainerModelConfig, size: int) -> "Layout":
        """Divide `size` ranks as configured. Raises ConfigError if `size` is not divisible."""
        with translate_error(ValueError, lambda error: ConfigError(str(error))):
            shard = config.sharding_ranks(size)
        return cls(config.dp_replicate, shard, config.cp.degree if config.cp else 1, config.tp, config.ep)

    @property
    def ep_shard(self) -> int:
        """Ranks of `shard` that divide the experts."""
        return max(1, self.ep // self.cp)

    @property
    def expert_shard(self) -> int:
        """Ranks that shard the same experts."""
        return self.shard // self.ep_shard

    @property
    def model_parallel_size(self) -> int:
        """Number of consecutive ranks that work on the same rows."""
        return self.cp * self.tp


class Mesh:
    """The groups of ranks, as submeshes of one mesh; groups that communicate most consist of neighbouring ranks.

    Dimensions, without those of size 1: dp_replicate, dp_shard, dp_shard_ep (the sharding ranks that divide the
    experts), cp, tp.
    """

    def __init__(self, layout: Layout, device_type: str, timeout_seconds: float) -> None:
        """Create the groups, with the time limit `timeout_seconds` of collectives; a collective call."""
        sizes = {
            "dp_replicate": layout.replicate,
            "dp_shard": layout.expert_shard,
            "dp_shard_ep": layout.ep_shard,
            "cp": layout.cp,
            "tp": layout.tp,
        }
        kept = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
        self._timeout, self._names = timedelta(seconds=timeout_seconds), tuple(kept)
        self._all = self._set_timeout(init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=self._names))
        # [shard] or [replicate, shard], all ranks with different rows or parts of rows: parameters are sharded and
        # gradients summed over it; experts over `expert_data`.
        self.data = self._with_replicas(self._flatten("dp_shard", "dp_shard_ep", "cp"))
        self.expert_data = self._with_replicas(self._all["dp_shard"]) if layout.ep > 1 else None
        self.ep = self._flatten("dp_shard_ep", "cp") if layout.ep > 1 else None  # the ranks that divide the experts
        self.cp = self._all["cp"] if layout.cp > 1 else None  # the ranks that share each row
        self.tp = self._all["tp"] if layout.tp > 1 else None  # the ranks that share each matrix

    def _flatten(self, *names: str) -> DeviceMesh:
        """Merge the existing dimensions among `names` into one."""
        present = tuple(name for name in names if name in self._names)
        if len(present) == 1:
            return self._all[present[0]]
        return self._set_timeout(self._all[present]._flatten("_".join(present)))

    def _with_replicas(self, sharding: DeviceMesh) -> DeviceMesh:
        if "dp_replicate" not in self._names:
            return sharding
        assert sharding.mesh_dim_names is not None
        with warnings.catch_warnings():  # torch 2.13 deprecates this use of flattened names without a replacement
            warnings.filterwarnings("ignore", "Slicing a flattened dim")
            return self._all["dp_replicate", sharding.mesh_dim_names[0]]

    def _set_timeout(self, mesh: DeviceMesh) -> DeviceMesh:
        for group in mesh.get_all_groups():  # torch creates them with its default of 10 or 30 minutes
            _set_pg_timeout(self._timeout, group)
        return mesh


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


def sum_forward(values: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the group; each summand gets the gradient of the sum, which must be equal on all ranks."""
    return _LinearMap.apply(values, partial(_sum, group=group), _identity)


def sum_backward(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return `values`, which are equal on all ranks; their gradient is the sum of the ranks' gradients."""
    return _LinearMap.apply(values, _identity, partial(_sum, group=group))


def gather_last(part: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenate equal parts of the last dimension: [..., d] to [..., ranks * d]."""
    return _LinearMap.apply(part, partial(_gather, group=group), partial(_split, group=group))


def split_last(whole: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's part of the last dimension: [..., ranks * d] to [..., d]."""
    return _LinearMap.apply(whole, partial(_split, group=group), partial(_gather, group=group))


def all_to_all(
    values: Tensor, group: ProcessGroup, received: list[int] | None = None, sent: list[int] | None = None
) -> Tensor:
    """Exchange parts of the first dimension of `values` [N, ...], which are in rank order, between all ranks.

    `received` and `sent` are the sizes of the part from and for each rank; None means equal parts. Returns
    [sum of `received`, ...], in rank order.
    """
    forward = partial(_all_to_all, group=group, received=received, sent=sent)
    backward = partial(_all_to_all, group=group, received=sent, sent=received)
    return _LinearMap.apply(values, forward, backward)


class _LinearMap(torch.autograd.Function):
    """Applies a linear map, and its transpose to the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, apply: _Map, transpose: _Map) -> Tensor:
        ctx.transpose = transpose
        return apply(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(grad), None, None


def _identity(values: Tensor) -> Tensor:
    return values.view_as(values)


def _sum(values: Tensor, group: ProcessGroup) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(part: Tensor, group: ProcessGroup) -> Tensor:
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, -1)


def _split(whole: Tensor, group: ProcessGroup) -> Tensor:
    return whole.chunk(group.size(), -1)[group.rank()].contiguous()


def _all_to_all(values: Tensor, group: ProcessGroup, received: list[int] | None, sent: list[int] | None) -> Tensor:
    # Functional: selective recomputation can save the result, and the compiler can trace it.
    return wait_tensor(all_to_all_single(values.contiguous(), received, sent, group))


@dataclass(frozen=True, slots=True)
class RowSlice:
    """One rank's part of a row, which is padded to a multiple of the ranks."""

    tokens: Tensor  # int64 [t]
    position_ids: Tensor  # int64 [t]
    boundaries: Tensor  # int32 [segments + 1], of the whole row; the padding is one more segment
    longest: int  # length of the longest segment
    begin: int  # position of the slice's first token in the row
    num_tokens: int  # number of tokens before the padding
    scored: Tensor  # int64, positions in the row of the trained tokens that the states of this slice predict
    routed_experts: Tensor | None = None  # [t, L, k], as in `MicroBatch`


class ContextParallel:
    """Divides rows over the ranks of a group; without a group, rows stay whole."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        self.size = 1 if group is None else group.size()

    def slice(self, row: MicroBatch) -> RowSlice:
        """Return this rank's slice of `row`."""
        if self._group is None:
            whole = (row.tokens, row.position_ids, row.boundaries, row.longest, 0, len(row.tokens), row.scored)
            return RowSlice(*whole, row.routed_experts)
        tokens, position_ids, boundaries, longest = row.tokens, row.position_ids, row.boundaries, row.longest
        if padding := -len(tokens) % self.size:
            positions = torch.arange(padding, device=tokens.device)
            tokens = torch.cat([tokens, torch.zeros_like(positions)])
            position_ids = torch.cat([position_ids, positions])
            boundaries = torch.cat([boundaries, boundaries[-1:] + padding])
            longest = max(longest, padding)
        length = len(tokens) // self.size
        begin = self._group.rank() * length
        mine = slice(begin, begin + length)
        first, last = np.searchsorted(row.scored_on_host, [begin, begin + length], side="right")
        scored = row.scored[first:last]
        num_tokens = min(max(len(row.tokens) - begin, 0), length)
        routes = None if row.routed_experts is None else row.routed_experts[mine]
        if routes is not None:
            routes = F.pad(routes, (0, 0, 0, 0, 0, length - num_tokens))
        return RowSlice(tokens[mine], position_ids[mine], boundaries, longest, begin, num_tokens, scored, routes)

    def sum_slices(self, values: Tensor) -> Tensor:
        """Sum values [..., T] over the ranks; each rank has the values of its slice, and 0 elsewhere."""
        return sum_forward(values, self._group)

    def scatter_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Convert [1, heads, t, D] of this slice to [1, heads / ranks, T, D] of the whole row.

        Key-value heads are repeated first if the ranks do not divide their number.
        """
        copies = math.lcm(key.shape[1], self.size) // key.shape[1]
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        parts = [x[0].unflatten(0, (self.size, -1)) for x in (query, key, value)]
        exchanged = all_to_all(torch.cat([part.flatten(1) for part in parts], 1), self._group)
        pieces = exchanged.split([part[0].numel() for part in parts], 1)
        shaped = [piece.unflatten(1, part.shape[1:]) for piece, part in zip(pieces, parts, strict=True)]
        return [x.transpose(0, 1).flatten(1, 2)[None] for x in shaped]

    def gather_heads(self, attended: Tensor) -> Tensor:
        """Convert [1, T, heads / ranks, D] of the whole row to [1, t, heads, D] of this slice."""
        exchanged = all_to_all(attended[0].unflatten(0, (self.size, -1)), self._group)
        return exchanged.transpose(0, 1).flatten(1, 2)[None]


def check_context_parallel(text: Any, config: TrainerModelConfig, cp: int) -> None:
    """Raise ConfigError if `cp` ranks cannot divide the heads of the model with the configuration `text`."""
    for layer in text.per_layer_config:
        heads = layer.num_attention_heads // config.tp
        kv_heads = (getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads) // config.tp
        if heads % math.lcm(kv_heads, cp):
            raise ConfigError(
                f"model.cp {cp}: {config.name} has {heads} heads and {kv_heads} key-value heads"
                f"{' on each rank of model.tp' if config.tp > 1 else ''}, which {cp} ranks cannot divide evenly"
            )
