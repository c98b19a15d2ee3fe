"""Encodes and applies deltas of tensors. The result is exact, or an error is raised (I5).

The hash of every tensor is checked before and after. A tensor that already equals the result is not changed, so a delta
can be applied twice, or again after an interruption.
"""

import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from prime_rl.core.types import PolicyVersion
from prime_rl.storage.delta.container import CodingUnit, Delta, DeltaError, TensorDelta, write_delta
from prime_rl.storage.delta.delta_encoding import BLOCK_BYTES, decode_block, encode_block
from prime_rl.storage.tensor_hashes import RawTensor

Tensors = Mapping[str, RawTensor]
T = TypeVar("T")
R = TypeVar("R")


def encode_delta(
    base: Tensors, new: Tensors, path: Path, base_version: PolicyVersion, version: PolicyVersion, threads: int = 1
) -> Delta:
    """Write the delta from `base` to `new` to the new file `path`, block by block, and open it.

    Raises:
        DeltaError: names, shapes or dtypes differ.
    """
    _check_same("the base and the new version cannot form a delta", new, base)

    def encode(names: list[str]) -> tuple[dict[str, TensorDelta], list[bytes]]:
        entries = {
            name: TensorDelta(new[name].dtype, new[name].shape, base[name].digest(name), new[name].digest(name))
            for name in names
        }
        if all(entry.base == entry.result for entry in entries.values()):
            return entries, []
        before, after = _joined(base, names), _joined(new, names)
        places = (slice(begin, begin + BLOCK_BYTES) for begin in range(0, after.size, BLOCK_BYTES))
        return entries, [encode_block(before[place], after[place], new[names[0]].dtype) for place in places]

    write_delta(path, _in_order(encode, _units(new), threads), base_version, version, BLOCK_BYTES)
    return Delta.open(path)


def patch_tensors(tensors: Tensors, delta: Delta, threads: int = 1) -> int:
    """Apply a delta to `tensors` in place, and return the number of changed ones.

    All of them are checked before the first is modified. Some or all may already equal the result.

    Raises:
        DeltaError: `tensors` are not the base and remain unchanged; or a result is wrong because of a fault of the
            machine or program, and their contents are undefined.
    """
    problem = f"{delta.path} does not match the base"
    _check_same(problem, delta.entries, tensors)
    found = dict(_in_order(lambda name: (name, tensors[name].digest(name)), delta.entries, threads))
    for name, entry in delta.entries.items():
        if found[name] not in (entry.base, entry.result):
            raise DeltaError(f"{problem}: tensor {name} has hash {found[name]}, expected {entry.base}")
    outdated = {name for name, entry in delta.entries.items() if found[name] != entry.result}
    units = (unit for unit in delta.units if not outdated.isdisjoint(unit.names))
    for _ in _in_order(lambda unit: _patch_unit(tensors, delta, unit, outdated), units, threads):
        pass
    return len(outdated)


def _check_same(problem: str, tensors: Mapping[str, RawTensor | TensorDelta], base: Tensors) -> None:
    """Raise DeltaError if names, dtypes or shapes differ."""
    missing, unknown = sorted(tensors.keys() - base.keys()), sorted(base.keys() - tensors.keys())
    if missing or unknown:
        raise DeltaError(f"{problem}: tensor {(missing + unknown)[0]} is in one and not in the other")
    for name, tensor in tensors.items():
        other = base[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            raise DeltaError(
                f"{problem}: tensor {name} is {other.dtype} {list(other.shape)} in the base, "
                f"{tensor.dtype} {list(tensor.shape)} in the other"
            )


def _units(tensors: Mapping[str, RawTensor]) -> list[list[str]]:
    """Group tensor names: small tensors of a dtype share a unit, because code tables would outweigh their changes."""
    units: list[list[str]] = []
    small: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.data.size >= BLOCK_BYTES // 4:
            units.append([name])
            continue
        unit = small.setdefault(tensor.dtype, [])
        if sum(tensors[other].data.size for other in unit) + tensor.data.size > BLOCK_BYTES:
            units.append(unit)
            unit = small[tensor.dtype] = []
        unit.append(name)
    return units + list(small.values())


def _joined(tensors: Tensors, names: Sequence[str]) -> NDArray[np.uint8]:
    """Return the bytes of a unit: those of its tensor, or a copy of several."""
    parts = [tensors[name].data for name in names]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _patch_unit(tensors: Tensors, delta: Delta, unit: CodingUnit, outdated: set[str]) -> None:
    data, blocks, dtype = _joined(tensors, unit.names), delta.blocks(unit), delta.entries[unit.names[0]].dtype
    try:
        for begin in range(0, data.size, delta.block_bytes):
            blocks = blocks[decode_block(blocks, data[begin : begin + delta.block_bytes], dtype) :]
        if blocks.nbytes:
            raise ValueError(f"{blocks.nbytes} bytes remain after the last block")
    except (ValueError, struct.error, zlib.error) as error:
        raise DeltaError(f"{delta.path} is malformed: tensor {unit.names[0]}: {error}") from None
    begin = 0
    for name in unit.names:
        tensor = tensors[name]
        made = RawTensor(tensor.dtype, tensor.shape, data[begin : begin + tensor.data.size])
        begin += tensor.data.size
        if name in outdated:
            if made.digest(name) != delta.entries[name].result:
                raise DeltaError(f"{delta.path} gives a wrong result: tensor {name} has another hash")
            if len(unit.names) > 1:  # decoded in a copy
                tensor.data[:] = made.data


def _in_order(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Map in order, with at most `threads` items in flight, so that few results are in memory."""
    if threads == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[R]] = deque()
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
