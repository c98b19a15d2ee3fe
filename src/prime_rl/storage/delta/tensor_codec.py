"""Encodes and applies deltas of tensors. The result is exact, or an error is raised (I5).

The hash of every tensor is checked before and after. A tensor that already equals the result is not changed, so a delta
can be applied twice, or again after an interruption.

Encodes the difference between two versions of one block. It is exact for every bit pattern and larger than the block
by at most its header.

Only changed elements are encoded, each by two numbers:

    where   the number of unchanged elements before it (its gap). Gaps between random changes are geometric, hence
            memoryless: they are written in base 255, where byte 255 means "255 unchanged elements follow", so that the
            bytes are independent and a code for single bytes loses nothing. If changes are rare, the nearly uniform
            lower eight bits of the gaps form a separate stream. If changes are frequent, a bitmap is smaller than gaps.
    what    the step from the old to the new value in units in the last place: the difference of the bit patterns in
            the order of the numbers they represent, zigzag-encoded (-1, 1, -2, 2 ... -> 1, 2, 3, 4 ...). Nearly all
            steps are small and take half a byte; the value 15 refers to the list of large steps.

The streams are independent draws from skewed distributions, so searching for repeated strings only costs time and
space. DEFLATE with Huffman codes and runs (zlib's Z_RLE) comes closest to the entropy, closer than zstd.
"""

import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from prime_rl.core.types import PolicyVersion
from prime_rl.storage.delta.container import CodingUnit, Delta, DeltaError, TensorDelta, write_delta
from prime_rl.storage.tensor_hashes import ITEM_BYTES, RawTensor

Tensors = Mapping[str, RawTensor]
T = TypeVar("T")
R = TypeVar("R")
BLOCK_BYTES = 8 * 1024**2
"""Size of a block: small enough for caches and bounded memory, large enough for negligible headers."""
Words = NDArray[Any]  # unsigned integers as wide as the elements
Bytes = NDArray[np.uint8]
_HEADER = struct.Struct("<BxxxI")  # kind, number of changes
_STREAM = struct.Struct("<II")  # uncompressed size, stored size; equal if stored uncompressed
_FURTHER = 255  # base-255 digit: 255 unchanged elements, followed by another digit
_RARE = 370  # mean gap above which gaps are split: about half of the digits would be _FURTHER
_FREQUENT = 8  # mean distance below which a bitmap takes fewer bytes than gaps
_LARGE = 15
_MEMORY = 9  # zlib's largest: a table of codes for every 32 Ki symbols
_EMPTY = np.empty(0, np.uint8)


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


_SAME, _GAPS, _BITMAP, _RAW = range(4)


def encode_block(base: Bytes, new: Bytes, dtype: str) -> bytes:
    """Encode the difference between the bytes `base` and `new` of one block of a tensor of `dtype`."""
    old, now = as_words(base, dtype), as_words(new, dtype)
    differs = old != now
    at = np.flatnonzero(differs)
    if not at.size:
        return _HEADER.pack(_SAME, 0)
    steps = zigzag_encode(ordered(now[at], dtype) - ordered(old[at], dtype))
    halves = _halves(np.minimum(steps - 1, _LARGE).astype(np.uint8))
    if at.size * _FREQUENT > old.size:
        kind, where = _BITMAP, (np.packbits(differs), _EMPTY)
    else:
        kind, where = _GAPS, _gaps(at)
    coded = b"".join(
        [_HEADER.pack(kind, at.size), *map(_pack, where), _pack(halves), _pack(_planes(steps[steps > _LARGE]))]
    )
    return coded if len(coded) < new.size else _HEADER.pack(_RAW, at.size) + new.tobytes()


def decode_block(coded: memoryview, data: Bytes, dtype: str) -> int:
    """Apply the delta of a block to the bytes `data` of its base, in place.

    Returns:
        The number of bytes of `coded` that the block occupies.

    Raises:
        ValueError: `coded` is not a delta of a block of this size; `data` is then undefined. zlib.error and
            struct.error have the same meaning.
    """
    kind, count = _HEADER.unpack_from(coded)
    if kind == _SAME:
        return _HEADER.size
    if kind == _RAW:
        end = _HEADER.size + data.size
        data[:] = np.frombuffer(coded[_HEADER.size : end], np.uint8)
        return end
    if kind not in (_GAPS, _BITMAP):
        raise ValueError(f"unknown block kind {kind}")
    where, end = _unpack(coded, _HEADER.size)
    low, end = _unpack(coded, end)
    halves, end = _unpack(coded, end)
    large, end = _unpack(coded, end)
    words = as_words(data, dtype)
    at = np.flatnonzero(np.unpackbits(where)) if kind == _BITMAP else _positions(where, low)
    if at.size != count or not count or at[-1] >= words.size:
        raise ValueError(f"{at.size} changes up to element {at[-1:]} of {words.size}, expected are {count}")
    steps = _from_halves(halves, count).astype(words.dtype) + words.dtype.type(1)
    steps[steps > _LARGE] = _from_planes(large, words.dtype)
    words[at] = unordered(ordered(words[at], dtype) + zigzag_decode(steps), dtype)
    return end


def as_words(data: Bytes, dtype: str) -> Words:
    """View bytes as unsigned integers of the width of `dtype`; as bytes if the dtype is unknown."""
    return data.view(f"u{ITEM_BYTES.get(dtype, 1)}")


def ordered(words: Words, dtype: str) -> Words:
    """Map bit patterns one-to-one to unsigned integers in the order of the numbers; neighbors differ by one.

    IEEE floats consist of sign and magnitude: negative numbers are reversed, positive numbers are moved above them.
    """
    if not dtype.startswith(("F", "BF")):
        return words
    top = 8 * words.itemsize - 1
    return words ^ (-(words >> top) | 1 << top)


def unordered(words: Words, dtype: str) -> Words:
    """Invert `ordered`."""
    if not dtype.startswith(("F", "BF")):
        return words
    top = 8 * words.itemsize - 1
    return words ^ ((words >> top) - 1 | 1 << top)


def zigzag_encode(steps: Words) -> Words:
    """Map signed differences in two's complement to unsigned integers: 0, -1, 1, -2 ... -> 0, 1, 2, 3 ..."""
    return (steps << 1) ^ -(steps >> (8 * steps.itemsize - 1))


def zigzag_decode(folded: Words) -> Words:
    """Invert `zigzag_encode`."""
    return (folded >> 1) ^ -(folded & 1)


def _gaps(at: NDArray[np.signedinteger[Any]]) -> tuple[Bytes, Bytes]:
    """Encode ascending positions as base-255 digits of their gaps; lower eight bits apart if the gaps are large."""
    gaps = np.diff(at.astype(np.int32), prepend=np.int32(-1)) - np.int32(1)
    if at[-1] < at.size * _RARE:
        return _base255(gaps), _EMPTY
    return _base255(gaps >> 8), gaps.astype(np.uint8)


def _positions(digits: Bytes, low: Bytes) -> NDArray[np.signedinteger[Any]]:
    """Invert `_gaps`."""
    gaps = _from_base255(digits)
    if low.size:
        gaps = gaps << 8 | low
    return np.cumsum(gaps + 1) - 1


def _base255(numbers: NDArray[np.signedinteger[Any]]) -> Bytes:
    further = numbers // _FURTHER
    if not further.any():
        return numbers.astype(np.uint8)
    ends = np.cumsum(further + 1) - 1
    digits = np.full(int(ends[-1]) + 1, _FURTHER, np.uint8)
    digits[ends] = numbers - further * _FURTHER
    return digits


def _from_base255(digits: Bytes) -> NDArray[np.signedinteger[Any]]:
    last = digits != _FURTHER
    if last.all():
        return digits.astype(np.int64)
    ends = np.flatnonzero(last)
    further: NDArray[np.int64] = np.diff(ends, prepend=-1) - 1
    return further * _FURTHER + digits[ends]


def _halves(values: Bytes) -> Bytes:
    if values.size % 2:
        values = np.append(values, np.uint8(0))
    return values[::2] | values[1::2] * np.uint8(16)


def _from_halves(packed: Bytes, count: int) -> Bytes:
    values = np.empty(2 * packed.size, np.uint8)
    values[::2], values[1::2] = packed & 15, packed >> 4
    return values[:count]


def _planes(values: Words) -> Bytes:
    """Return all lowest bytes, then all second lowest bytes, etc.: the upper bytes are nearly constant."""
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T).reshape(-1)


def _from_planes(planes: Bytes, dtype: np.dtype[Any]) -> Words:
    return np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).reshape(-1).view(dtype)


def _pack(stream: Bytes) -> bytes:
    deflate = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, _MEMORY, zlib.Z_RLE)
    packed = deflate.compress(stream.data) + deflate.flush() if stream.size else b""
    if len(packed) >= stream.size:
        packed = stream.tobytes()
    return _STREAM.pack(stream.size, len(packed)) + packed


def _unpack(coded: memoryview, at: int) -> tuple[Bytes, int]:
    """Return the stream at offset `at` and the offset of its end."""
    size, stored = _STREAM.unpack_from(coded, at)
    at += _STREAM.size
    packed = coded[at : at + stored]
    data = packed if size == stored else zlib.decompress(packed, -zlib.MAX_WBITS, size)
    if len(data) != size:
        raise ValueError(f"a stream has {len(data)} bytes instead of {size}")
    return np.frombuffer(data, np.uint8), at + stored
