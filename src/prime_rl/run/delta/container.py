"""I4, I5: the file of a delta. It is whole and unaltered, or it is not opened; and it names what it starts from.

    magic | blocks of the first unit | ... of the last | index (JSON, zlib) | length of the index | xxh3_64 | magic

A unit is one tensor, or several small ones. The index comes last, so that the file is written in one pass; xxh3_64 is
over all that stands before it.
"""

import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from prime_rl.run.artifact import ArtifactError
from prime_rl.run.tensors import content_hash
from prime_rl.types import PolicyVersion

FORMAT = "prime_rl.delta/1"
_MAGIC = b"PRLDELTA"
_LENGTH = struct.Struct("<Q")
_END = struct.Struct("<Q8s")


class DeltaError(ArtifactError):
    """A delta that is damaged, or does not fit what it shall be applied to; the message names the file."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a delta.

    Attributes:
        dtype: as safetensors spells it.
        shape: of the tensor.
        base: its hash before, as in the manifest of the base version.
        result: its hash after; equal to `base` where nothing changed.
    """

    dtype: str
    shape: tuple[int, ...]
    base: str
    result: str


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that are coded together, as if they were one.

    Attributes:
        names: of the tensors, in the order in which their bytes follow each other.
        offset: of its blocks in the file.
        size: of its blocks in bytes, 0 where none of the tensors changed.
    """

    names: tuple[str, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """An opened delta.

    Attributes:
        path: the file.
        base_version: that it starts from; None where it was made of weights without a manifest.
        version: that it leads to, or None.
        block_bytes: units are coded in blocks of this many bytes.
        entries: tensor name -> entry.
        units: that together hold every tensor once.
        data: the file.
    """

    path: Path
    base_version: PolicyVersion | None
    version: PolicyVersion | None
    block_bytes: int
    entries: dict[str, Entry]
    units: tuple[Unit, ...]
    data: memoryview

    @classmethod
    def open(cls, path: Path) -> "Delta":
        """Read the file and check that all of it is as it was written.

        Raises:
            DeltaError: it is not a delta, truncated, altered, or of another format.
        """
        if not path.is_file():
            raise DeltaError(f"{path} is missing")
        if not path.stat().st_size:
            raise DeltaError(f"{path} is empty")
        data = np.fromfile(path, np.uint8).data  # a mapped file that is cut short would end the process
        fields, end = _read_index(path, data)
        try:
            before, after = _read_version(fields["base"]), _read_version(fields["result"])
            entries = {name: Entry(e[0], tuple(e[1]), e[2], e[3]) for name, e in fields["tensors"].items()}
            units = tuple(Unit(tuple(u[0]), u[1], u[2]) for u in fields["units"])
            block_bytes = int(fields["block_bytes"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DeltaError(f"the index of {path} is malformed: {error!r}") from None
        if any(unit.offset + unit.size > end for unit in units):
            raise DeltaError(f"the index of {path} is malformed: a unit reaches beyond the blocks")
        if sorted(name for unit in units for name in unit.names) != sorted(entries):
            raise DeltaError(f"the index of {path} is malformed: units and tensors differ")
        return cls(path, before, after, block_bytes, entries, units, data)

    @property
    def base_hash(self) -> str:
        """Content hash of the version that it starts from."""
        return content_hash({name: entry.base for name, entry in self.entries.items()})

    @property
    def hashes(self) -> dict[str, str]:
        """Tensor name -> hash after, as the manifest of the resulting version lists them."""
        return {name: entry.result for name, entry in self.entries.items()}

    @property
    def hash(self) -> str:
        """Content hash of the version that it leads to."""
        return content_hash(self.hashes)

    def blocks(self, unit: Unit) -> memoryview:
        """Return the coded blocks of a unit."""
        return self.data[unit.offset : unit.offset + unit.size]


def write_delta(
    path: Path,
    units: Iterable[tuple[dict[str, Entry], list[bytes]]],
    base_version: PolicyVersion | None,
    version: PolicyVersion | None,
    block_bytes: int,
) -> None:
    """Write a delta as its units come; nothing is left of it where they end in an error.

    Args:
        path: the file, which must not exist yet.
        units: the entries of each by name, and its coded blocks, [] where none of its tensors changed.
        base_version: that the delta starts from, None if unknown.
        version: that it leads to, None if unknown.
        block_bytes: that units were split into.
    """
    entries: dict[str, Entry] = {}
    places: list[tuple[list[str], int, int]] = []
    digest = xxhash.xxh3_64()
    with path.open("xb") as file:

        def write(chunk: bytes) -> None:
            digest.update(chunk)
            file.write(chunk)

        try:
            write(_MAGIC)
            for unit, blocks in units:
                offset = file.tell()
                for block in blocks:
                    write(block)
                entries |= unit
                places.append((list(unit), offset, file.tell() - offset))
            index = {
                "format": FORMAT,
                "base": _side(base_version, {name: entry.base for name, entry in entries.items()}),
                "result": _side(version, {name: entry.result for name, entry in entries.items()}),
                "block_bytes": block_bytes,
                "tensors": {name: astuple(entry) for name, entry in entries.items()},
                "units": places,
            }
            packed = zlib.compress(json.dumps(index, separators=(",", ":")).encode(), 9)
            write(packed)
            write(_LENGTH.pack(len(packed)))
            file.write(_END.pack(digest.intdigest(), _MAGIC))
        except BaseException:
            path.unlink()
            raise


def _side(version: PolicyVersion | None, hashes: dict[str, str]) -> dict[str, Any]:
    branch, step = (version.branch, version.step) if version else (None, None)
    return {"branch": branch, "step": step, "hash": content_hash(hashes)}


def _read_version(side: dict[str, Any]) -> PolicyVersion | None:
    return None if side["step"] is None else PolicyVersion(side["branch"], side["step"])


def _read_index(path: Path, data: memoryview) -> tuple[dict[str, Any], int]:
    """Check the file from its end; return the index and where it begins."""
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise DeltaError(f"{path} is not a delta")
    end = len(data) - _END.size
    if end < len(_MAGIC) + _LENGTH.size:
        raise DeltaError(f"{path} is truncated: it has {len(data)} bytes")
    digest, magic = _END.unpack_from(data, end)
    if magic != _MAGIC:
        raise DeltaError(f"{path} is truncated: its {len(data)} bytes do not end as a delta does")
    if xxhash.xxh3_64_intdigest(data[:end]) != digest:
        raise DeltaError(f"{path} is damaged: its checksum is another")
    end -= _LENGTH.size
    begin = end - _LENGTH.unpack_from(data, end)[0]
    fields: dict[str, Any] = json.loads(zlib.decompress(data[begin:end]))
    if fields.get("format") != FORMAT:
        raise DeltaError(f"{path} has format {fields.get('format')!r}, expected {FORMAT!r}")
    return fields, begin
