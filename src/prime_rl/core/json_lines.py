"""Reads files of JSON lines that other processes append to, by byte offset. Nothing in them can raise."""

import os
from collections.abc import Callable, Iterable, Iterator
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
        while not objects and (lines := self.read_lines(max_bytes)):
            objects = list(_objects(lines))
            self.num_damaged += sum(bool(line.strip()) for line in lines) - len(objects)
        return objects

    def follow(self, on_replaced: Callable[[], object]) -> Iterator[dict[str, Any]]:
        """Yield all new objects; `on_replaced` is called before those of a file that has replaced the earlier one."""
        while True:
            replaced = self.num_replaced
            rows = self.read()
            if self.num_replaced != replaced:
                on_replaced()
            if not rows:
                return
            yield from rows

    def read_lines(self, max_bytes: int = 2**22) -> list[bytes]:
        """Return new complete lines as `read` does, without decoding them."""
        lines: list[bytes] = []
        with suppress(OSError), self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self.position.inode or status.st_size < self.position.offset:
                self.num_replaced += self.position.inode != 0
                self.position, self.num_damaged = FilePosition(status.st_ino, 0), 0
            file.seek(self.position.offset)
            size = 0
            for line in file:
                if not line.endswith(b"\n") or (lines and size >= max_bytes):
                    break
                size += len(line)
                lines.append(line)
            self.position = FilePosition(status.st_ino, self.position.offset + size)
        return lines


class JsonTail:
    """Follows one file that a rollback may replace by another one that begins with some of the same lines.

    Those are not returned again (`storage.rollback`).
    """

    def __init__(self, path: Path) -> None:
        self._file = JsonLinesFile(path)
        self._num_lines = self._num_replaced = 0
        self._seen: list[int] = []

    def read(self) -> list[dict[str, Any]]:
        """Return the objects of all new lines."""
        new: list[bytes] = []
        while lines := self._file.read_lines():
            if self._file.num_replaced != self._num_replaced:
                self._num_lines, self._num_replaced = 0, self._file.num_replaced
            for line in lines:
                if self._seen[self._num_lines : self._num_lines + 1] != [hash(line)]:
                    self._seen[self._num_lines :] = [hash(line)]
                    new.append(line)
                self._num_lines += 1
        return list(_objects(new))


def decode_object(line: bytes, max_bytes: float = MAX_LINE_BYTES) -> dict[str, Any] | None:
    """Decode a line; None if it is no JSON object, or too long."""
    if len(line) > max_bytes:
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
        return list(_objects(file.read(end.offset - begin.offset).splitlines()))
    return None


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if (row := decode_object(line)) is not None:
            yield row
