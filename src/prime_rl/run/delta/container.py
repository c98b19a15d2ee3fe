"""I4, I5: the file of a delta. It is whole and unaltered, or it is not opened; and it names what it starts from.

    magic | blocks of the first tensor | ... of the last | index (JSON) | length of the index | xxh3_64 | magic

The index comes last, so that the file is written in one pass; xxh3_64 is over all that stands before it.
"""

import json
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
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
        offset: of its blocks in the file, filled in when it is written.
        size: of its blocks in bytes, 0 where nothing changed.
    """

    dtype: str
    shape: tuple[int, ...]
    base: str
    result: str
    offset: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """An opened delta.

    Attributes:
        path: the file.
        base_version: that it starts from; None where it was made of weights without a manifest.
        version: that it leads to, or None.
        block_bytes: tensors are coded in blocks of this many bytes.
        entries: tensor name -> entry, in the order of the file.
        data: the file, mapped.
    """

    path: Path
    base_version: PolicyVersion | None
    version: PolicyVersion | None
    block_bytes: int
    entries: dict[str, Entry]
    data: memoryview

    @classmethod
    def open(cls, path: Path) -> "Delta":
        """Map the file and check that all of it is as it was written.

        Raises:
            DeltaError: it is not a delta, truncated, altered, or of another format.
        """
        if not path.is_file():
            raise DeltaError(f"{path} is missing")
        if not path.stat().st_size:
            raise DeltaError(f"{path} is empty")
        data = np.memmap(path, np.uint8, mode="r").data
        fields, index = _read_index(path, data)
        try:
            entries = {
                name: Entry(**{**entry, "shape": tuple(entry["shape"])}) for name, entry in fields["tensors"].items()
            }
            before, after = _read_version(fields["base"]), _read_version(fields["result"])
            block_bytes = int(fields["block_bytes"])
        except (KeyError, TypeError, ValueError) as error:
            raise DeltaError(f"the index of {path} is malformed: {error!r}") from None
        if any(entry.offset + entry.size > index for entry in entries.values()):
            raise DeltaError(f"the index of {path} is malformed: a tensor reaches beyond the blocks")
        return cls(path, before, after, block_bytes, entries, data)

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

    def blocks(self, name: str) -> memoryview:
        """Return the coded blocks of a tensor."""
        entry = self.entries[name]
        return self.data[entry.offset : entry.offset + entry.size]


def write_delta(
    path: Path,
    tensors: Iterable[tuple[str, Entry, list[bytes]]],
    base_version: PolicyVersion | None,
    version: PolicyVersion | None,
    block_bytes: int,
) -> None:
    """Write a delta as its tensors come; nothing is left of it where they end in an error.

    Args:
        path: the file, which must not exist yet.
        tensors: name, entry (its place in the file is filled in here) and coded blocks.
        base_version: that the delta starts from, None if unknown.
        version: that it leads to, None if unknown.
        block_bytes: that tensors were split into.
    """
    entries: dict[str, Entry] = {}
    digest = xxhash.xxh3_64()
    with path.open("xb") as file:

        def write(chunk: bytes) -> None:
            digest.update(chunk)
            file.write(chunk)

        try:
            write(_MAGIC)
            for name, entry, blocks in tensors:
                offset = file.tell()
                for block in blocks:
                    write(block)
                entries[name] = replace(entry, offset=offset, size=file.tell() - offset)
            index = json.dumps(_index(entries, base_version, version, block_bytes)).encode()
            write(index)
            write(_LENGTH.pack(len(index)))
            file.write(_END.pack(digest.intdigest(), _MAGIC))
        except BaseException:
            path.unlink()
            raise


def _index(
    entries: dict[str, Entry], base_version: PolicyVersion | None, version: PolicyVersion | None, block_bytes: int
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "base": _side(base_version, {name: entry.base for name, entry in entries.items()}),
        "result": _side(version, {name: entry.result for name, entry in entries.items()}),
        "block_bytes": block_bytes,
        "tensors": {name: asdict(entry) for name, entry in entries.items()},
    }


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
    fields: dict[str, Any] = json.loads(bytes(data[begin:end]))
    if fields.get("format") != FORMAT:
        raise DeltaError(f"{path} has format {fields.get('format')!r}, expected {FORMAT!r}")
    return fields, begin
