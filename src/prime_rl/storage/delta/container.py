"""The file format of deltas. Opening a file verifies that it is complete and unmodified (I4, I5).

    magic | blocks of the first unit | ... of the last | index (JSON, zlib) | length of the index | xxh3_64 | magic

A unit is one tensor, or several small ones. The index comes last, so that the file is written in one pass. xxh3_64
covers everything before it.
"""

import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from prime_rl.core.types import PolicyVersion
from prime_rl.storage.artifact import ArtifactError
from prime_rl.storage.tensor_hashes import content_hash

FORMAT = "prime_rl.delta/1"
_MAGIC = b"PRLDELTA"
_LENGTH = struct.Struct("<Q")
_END = struct.Struct("<Q8s")


class DeltaError(ArtifactError):
    """A delta is damaged or does not match its base; the message names the file."""


class TensorDelta(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a delta.

    Attributes:
        dtype: safetensors name.
        shape: shape of the tensor.
        base: hash before, as in the manifest of the base version.
        result: hash after; equal to `base` if nothing changed.
    """

    dtype: str
    shape: tuple[int, ...]
    base: str
    result: str


class CodingUnit(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that are encoded together, as if they were one.

    Attributes:
        names: tensor names in the order of their bytes.
        offset: offset of the blocks in the file.
        size: size of the blocks in bytes; 0 if no tensor changed.
    """

    names: tuple[str, ...]
    offset: int
    size: int


class _Side(msgspec.Struct):
    """Base or result: the version, and the content hash of its tensors."""

    branch: int
    step: int
    hash: str


class _Index(msgspec.Struct):
    format: str
    base: _Side
    result: _Side
    block_bytes: int
    tensors: dict[str, TensorDelta]
    units: tuple[CodingUnit, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """An opened delta.

    Attributes:
        path: the file.
        base_version: version of the base.
        version: version of the result.
        block_bytes: size of the blocks in which units are encoded.
        entries: tensor name -> entry.
        units: units that together contain every tensor once.
        data: contents of the file.
    """

    path: Path
    base_version: PolicyVersion
    version: PolicyVersion
    block_bytes: int
    entries: dict[str, TensorDelta]
    units: tuple[CodingUnit, ...]
    data: memoryview

    @classmethod
    def open(cls, path: Path) -> "Delta":
        """Read the file and verify its checksum and index.

        Raises:
            DeltaError: the file is missing, not a delta, truncated, modified, or of another format.
        """
        if not path.is_file():
            raise DeltaError(f"{path} is missing")
        data = np.fromfile(path, np.uint8).data  # if a memory-mapped file were truncated, the process would be killed
        if bytes(data[: len(_MAGIC)]) != _MAGIC:
            raise DeltaError(f"{path} is not a delta")
        end = len(data) - _END.size
        if end < len(_MAGIC) + _LENGTH.size:
            raise DeltaError(f"{path} is truncated: it has {len(data)} bytes")
        digest, magic = _END.unpack_from(data, end)
        if magic != _MAGIC:
            raise DeltaError(f"{path} is truncated: its {len(data)} bytes do not end with the magic number")
        if xxhash.xxh3_64_intdigest(data[:end]) != digest:
            raise DeltaError(f"{path} is damaged: the checksum does not match")
        end -= _LENGTH.size
        fields = json.loads(zlib.decompress(data[end - _LENGTH.unpack_from(data, end)[0] : end]))
        if fields.get("format") != FORMAT:
            raise DeltaError(f"{path} has format {fields.get('format')!r}, expected {FORMAT!r}")
        try:
            index = msgspec.convert(fields, _Index)
        except msgspec.ValidationError as error:
            raise DeltaError(f"the index of {path} is malformed: {error}") from None
        if sorted(name for unit in index.units for name in unit.names) != sorted(index.tensors):
            raise DeltaError(f"the index of {path} is malformed: units and tensors differ")
        before, after = (PolicyVersion(side.branch, side.step) for side in (index.base, index.result))
        return cls(path, before, after, index.block_bytes, index.tensors, index.units, data)

    @property
    def hashes(self) -> dict[str, str]:
        """Tensor name -> hash after, as in the manifest of the resulting version."""
        return {name: entry.result for name, entry in self.entries.items()}

    def blocks(self, unit: CodingUnit) -> memoryview:
        """Return the encoded blocks of a unit."""
        return self.data[unit.offset : unit.offset + unit.size]


def write_delta(
    path: Path,
    units: Iterable[tuple[dict[str, TensorDelta], list[bytes]]],
    base_version: PolicyVersion,
    version: PolicyVersion,
    block_bytes: int,
) -> None:
    """Write a delta to the new file `path`. After an error, the caller removes it.

    Each of the `units` is the entries of its tensors, and its encoded blocks: [] if no tensor changed.
    """
    entries: dict[str, TensorDelta] = {}
    places: list[CodingUnit] = []
    digest = xxhash.xxh3_64()
    with path.open("xb") as file:

        def write(chunk: bytes) -> None:
            digest.update(chunk)
            file.write(chunk)

        def side(of: PolicyVersion, hashes: dict[str, str]) -> _Side:
            return _Side(of.branch, of.step, content_hash(hashes))

        write(_MAGIC)
        for unit, blocks in units:
            offset = file.tell()
            for block in blocks:
                write(block)
            entries |= unit
            places.append(CodingUnit(tuple(unit), offset, file.tell() - offset))
        base = side(base_version, {name: entry.base for name, entry in entries.items()})
        result = side(version, {name: entry.result for name, entry in entries.items()})
        index = _Index(FORMAT, base, result, block_bytes, entries, tuple(places))
        packed = zlib.compress(msgspec.json.encode(index), 9)
        write(packed)
        write(_LENGTH.pack(len(packed)))
        file.write(_END.pack(digest.intdigest(), _MAGIC))
