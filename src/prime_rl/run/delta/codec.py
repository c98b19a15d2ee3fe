"""I5: what a delta makes of its base is, byte for byte, what it was made from, or it is one error.

Base and result are compared with their hashes per tensor, before anything is touched and after. A tensor that already
is the result is left as it is: applying a delta twice, or again after an interruption, changes nothing.
"""

import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from prime_rl.run.artifact import MANIFEST, WEIGHTS_FORMAT, ArtifactError, read_manifest
from prime_rl.run.delta.block import BLOCK_BYTES, decode_block, encode_block
from prime_rl.run.delta.container import Delta, DeltaError, Entry, Unit, write_delta
from prime_rl.run.tensors import RawTensor, map_tensors
from prime_rl.types import PolicyVersion

Weights = Path | Mapping[str, RawTensor] | Mapping[str, NDArray[Any]]
"""A directory of safetensors files, whose manifest, if it has one, tells its version; or tensors by name."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Version:
    """Tensors, what to call them in messages, and what their manifest says of them."""

    label: str
    tensors: dict[str, RawTensor]
    version: PolicyVersion | None
    hashes: Mapping[str, str]


def encode(
    base: Weights,
    new: Weights,
    path: Path,
    *,
    base_version: PolicyVersion | None = None,
    version: PolicyVersion | None = None,
    threads: int = 1,
) -> Delta:
    """Write what makes `new` of `base` to the file `path`; neither is ever held in memory as a whole.

    Args:
        base: the version that the reader has.
        new: the version that the reader shall have, of the same names, shapes and dtypes.
        path: to write, must not exist yet.
        base_version: of `base`; directories tell theirs by their manifest.
        version: of `new`, likewise.
        threads: that code tensors at the same time.

    Returns:
        The delta, opened.

    Raises:
        DeltaError: names, shapes or dtypes differ, or a directory is not what its manifest says.
        ArtifactError: a directory is incomplete.
        OSError: the disk is full ...; nothing is left of the file.
    """
    old, now = _read(base, "the base", base_version), _read(new, "the new version", version)
    _check_same(f"{old.label} and {now.label} make no delta", now.tensors, old.tensors)

    def code(names: list[str]) -> tuple[dict[str, Entry], list[bytes]]:
        entries = {
            name: Entry(now.tensors[name].dtype, now.tensors[name].shape, _true_hash(name, old), _true_hash(name, now))
            for name in names
        }
        if all(entry.base == entry.result for entry in entries.values()):
            return entries, []
        return entries, _encode_unit([old.tensors[name] for name in names], [now.tensors[name] for name in names])

    write_delta(path, _in_order(code, _units(now.tensors), threads), old.version, now.version, BLOCK_BYTES)
    return Delta.open(path)


def apply(
    base: Weights, delta: Delta, *, version: PolicyVersion | None = None, threads: int = 1
) -> Iterator[tuple[str, RawTensor]]:
    """Make the new version of `base`, tensor by tensor.

    All of `base` is checked before this returns, each result before it is yielded. What did not change is yielded as
    it is in `base`, what did as new memory.

    Args:
        base: the version that the delta starts from (or, in whole or in part, leads to already).
        delta: as `Delta.open` or `encode` returns it.
        version: of `base`; a directory tells its own by its manifest.
        threads: that check `base`.

    Returns:
        Tensor name, tensor: in the order of the delta.

    Raises:
        DeltaError: `base` is another version or other tensors; or, while iterating, a result is wrong.
        ArtifactError: a directory is incomplete.
    """
    old = _read(base, "the base", version)
    outdated = _outdated(delta, old, threads)
    return (made for unit in delta.units for made in _make(delta, unit, old.tensors, outdated, in_place=False))


def patch(
    tensors: Mapping[str, RawTensor] | Mapping[str, NDArray[Any]],
    delta: Delta,
    *,
    version: PolicyVersion | None = None,
    threads: int = 1,
) -> int:
    """Make the new version of `tensors` in place; all of them are checked before the first is touched.

    Args:
        tensors: writable, the version that the delta starts from (or, in whole or in part, leads to already).
        delta: as `Delta.open` or `encode` returns it.
        version: of `tensors`, where it is known.
        threads: that work at the same time.

    Returns:
        How many tensors were changed; 0 if all were the result already.

    Raises:
        DeltaError: `tensors` are another version or other tensors, and unchanged; or a result is wrong, which only
            a fault of this machine or program explains, and they are lost.
        ValueError: a tensor is not writable.
    """
    old = _read(tensors, "the base", version)
    locked = [name for name, tensor in old.tensors.items() if not tensor.data.flags.writeable]
    if locked:
        raise ValueError(f"tensor {locked[0]} is not writable")
    outdated = _outdated(delta, old, threads)
    for _ in _in_order(lambda unit: _make(delta, unit, old.tensors, outdated, in_place=True), delta.units, threads):
        pass
    return len(outdated)


def _read(weights: Weights, label: str, version: PolicyVersion | None) -> _Version:
    if not isinstance(weights, Path):
        tensors = {name: t if isinstance(t, RawTensor) else RawTensor.of(t) for name, t in weights.items()}
        return _Version(label, tensors, version, {})
    tensors = map_tensors(weights)
    if not (weights / MANIFEST).exists():
        return _Version(str(weights), tensors, version, {})
    manifest = read_manifest(weights, WEIGHTS_FORMAT)
    try:
        declared, hashes = PolicyVersion(manifest["branch"], manifest["step"]), manifest["tensors"]
    except KeyError as error:
        raise ArtifactError(f"{weights / MANIFEST} lacks {error}") from None
    if version not in (None, declared):
        raise DeltaError(f"{weights} is version {declared}, expected is {version}")
    return _Version(str(weights), tensors, declared, hashes)


def _true_hash(name: str, side: _Version) -> str:
    """Hash a tensor; where its manifest says another hash, it is not what was published."""
    found = side.tensors[name].digest(name)
    if side.hashes and side.hashes.get(name) != found:
        raise DeltaError(f"{side.label} is not what was published: tensor {name} has another hash")
    return found


def _check_same(problem: str, tensors: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Compare names, dtypes and shapes of what has them."""
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


def _outdated(delta: Delta, base: _Version, threads: int) -> set[str]:
    """Names of the tensors that have to change; every tensor is either the delta's base or its result."""
    problem = f"{delta.path} does not fit {base.label}"
    known = (delta.base_version, delta.version)
    if base.version and None not in known and base.version not in known:
        raise DeltaError(f"{problem}: it leads from version {known[0]} to {known[1]}, the base is {base.version}")
    _check_same(problem, delta.entries, base.tensors)
    found = dict(_in_order(lambda name: (name, base.tensors[name].digest(name)), delta.entries, threads))
    for name, entry in delta.entries.items():
        if found[name] not in (entry.base, entry.result):
            raise DeltaError(f"{problem}: tensor {name} has hash {found[name]}, expected is {entry.base}")
    return {name for name, entry in delta.entries.items() if found[name] != entry.result}


def _units(tensors: Mapping[str, RawTensor]) -> list[list[str]]:
    """Group names: small tensors of a dtype are coded together, whose tables of codes would outweigh their changes."""
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


def _encode_unit(base: list[RawTensor], new: list[RawTensor]) -> list[bytes]:
    before, after = (side[0].data if len(side) == 1 else _joined(side) for side in (base, new))
    places = (slice(begin, begin + BLOCK_BYTES) for begin in range(0, after.size, BLOCK_BYTES))
    return [encode_block(before[place], after[place], new[0].dtype) for place in places]


def _joined(tensors: list[RawTensor]) -> NDArray[np.uint8]:
    return np.concatenate([tensor.data for tensor in tensors])


def _make(
    delta: Delta, unit: Unit, base: Mapping[str, RawTensor], outdated: set[str], in_place: bool
) -> list[tuple[str, RawTensor]]:
    """Make the results of a unit, in place or as new memory; what is up to date is passed on as it is."""
    before = [base[name] for name in unit.names]
    if outdated.isdisjoint(unit.names):
        return list(zip(unit.names, before, strict=True))
    direct = in_place and len(before) == 1
    data = before[0].data if direct else _joined(before)
    _decode_unit(delta, unit, data)
    made: list[tuple[str, RawTensor]] = []
    begin = 0
    for name, tensor in zip(unit.names, before, strict=True):
        result = replace(tensor, data=data[begin : begin + tensor.data.size])
        begin += tensor.data.size
        if name not in outdated:
            result = tensor
        elif result.digest(name) != delta.entries[name].result:
            raise DeltaError(f"{delta.path} does not lead to its result: tensor {name} has another hash")
        elif in_place and not direct:
            tensor.data[:] = result.data
        made.append((name, result))
    return made


def _decode_unit(delta: Delta, unit: Unit, data: NDArray[np.uint8]) -> None:
    blocks, dtype = delta.blocks(unit), delta.entries[unit.names[0]].dtype
    try:
        for begin in range(0, data.size, delta.block_bytes):
            blocks = blocks[decode_block(blocks, data[begin : begin + delta.block_bytes], dtype) :]
        if blocks.nbytes:
            raise ValueError(f"{blocks.nbytes} bytes are left over")
    except (ValueError, struct.error, zlib.error) as error:
        raise DeltaError(f"{delta.path} is malformed: tensor {unit.names[0]}: {error}") from None


def _in_order(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Map in order, as many items ahead as there are threads, so that few results are in memory."""
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
