"""Reads files of JSON lines that other processes append to, by byte offset. Nothing in them can raise."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

MAX_LINE_BYTES = 2**22
"""Longer lines count as damaged."""


@dataclass(frozen=True, slots=True)
class FilePosition:
    """A position in a file: the identity of the file and a byte offset. `str` and `parse` convert it for a URL."""

    inode: int = 0
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.inode}-{self.offset}"

    @classmethod
    def parse(cls, text: str) -> "FilePosition":
        """Parse `str(position)`; the beginning of a file if `text` is malformed."""
        inode, _, offset = text.partition("-")
        return cls(int(inode), int(offset)) if inode.isdecimal() and offset.isdecimal() else cls()


class JsonLinesFile:
    """Follows one file: `read` returns the objects of the lines that were completed since the last call.

    Attributes:
        position: end of the last complete line that was read.
        num_damaged: lines that were skipped because they are no JSON objects.
        num_replaced: how often another, or a shorter, file took the place of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = FilePosition()
        self.num_damaged = self.num_replaced = 0

    def read(self, max_bytes: int = 2**22) -> list[dict[str, Any]]:
        """Return new objects from about `max_bytes`; [] if there are none, or if the file is missing.

        Call it until it returns []. It starts again when the file is replaced (`num_replaced` changes).
        """
        objects: list[dict[str, Any]] = []
        with suppress(OSError), self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self.position.inode or status.st_size < self.position.offset:
                self.num_replaced += self.position.inode != 0
                self.position, self.num_damaged = FilePosition(status.st_ino, 0), 0
            file.seek(self.position.offset)
            offset = self.position.offset
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if objects and offset - self.position.offset >= max_bytes:
                    break
                offset += len(line)
                if (row := decode_object(line)) is not None:
                    objects.append(row)
                else:
                    self.num_damaged += bool(line.strip())
            self.position = FilePosition(status.st_ino, offset)
        return objects


def decode_object(line: bytes) -> dict[str, Any] | None:
    """Decode a line; None if it is no JSON object, or too long."""
    if len(line) > MAX_LINE_BYTES:
        return None
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        row = msgspec.json.decode(line)
        return row if isinstance(row, dict) else None
    return None


def read_between(path: Path, begin: FilePosition, end: FilePosition, max_bytes: int) -> list[dict[str, Any]] | None:
    """Return the objects between two positions; None if the file was replaced or they are more than `max_bytes`."""
    if begin.inode != end.inode or not 0 <= end.offset - begin.offset <= max_bytes:
        return None
    if begin.offset == end.offset:
        return []
    with suppress(OSError), path.open("rb") as file:
        if os.fstat(file.fileno()).st_ino != begin.inode:
            return None
        file.seek(begin.offset)
        return list(_objects(file.read(end.offset - begin.offset)))
    return None


def _objects(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        if (row := decode_object(line)) is not None:
            yield row
