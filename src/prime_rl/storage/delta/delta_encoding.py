"""Encodes the difference between two versions of one block. It is exact for every bit pattern and larger than the block
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_rl.storage.tensor_hashes import ITEM_BYTES

BLOCK_BYTES = 8 * 1024**2
"""Size of a block: small enough for caches and bounded memory, large enough for negligible headers."""

Words = NDArray[Any]  # unsigned integers as wide as the elements
Bytes = NDArray[np.uint8]

_SAME, _GAPS, _BITMAP, _RAW = range(4)
_HEADER = struct.Struct("<BxxxI")  # kind, number of changes
_STREAM = struct.Struct("<II")  # uncompressed size, stored size; equal if stored uncompressed
_FURTHER = 255  # base-255 digit: 255 unchanged elements, followed by another digit
_RARE = 370  # mean gap above which gaps are split: about half of the digits would be _FURTHER
_FREQUENT = 8  # mean distance below which a bitmap takes fewer bytes than gaps
_LARGE = 15
_MEMORY = 9  # zlib's largest: a table of codes for every 32 Ki symbols
_EMPTY = np.empty(0, np.uint8)


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
