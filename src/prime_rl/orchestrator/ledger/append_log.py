"""An append-only file of records, and the files of the groups that they refer to, written by a separate thread.

The file is always a prefix of the appended records, except for a truncated last line. A group is written before its
record. All waiting records are written with one write and one fsync (group commit). Only `flush` waits for the disk.
The first error ends the thread, and every later call raises it.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec
from xxhash import xxh3_128_hexdigest

from prime_rl.core.errors import RunError, summarize_exception, translate_error
from prime_rl.core.types import Group
from prime_rl.orchestrator.ledger.ledger_records import Done
from prime_rl.orchestrator.ledger.pending_groups import encode_group, write_groups
from prime_rl.storage.artifact import fsync

_Entry = tuple[msgspec.Struct, tuple[Path, Group] | None]
"""A record, and for `Done` the group to write to a path before it."""


class AppendLog:
    """Writes a file of JSON lines; call `close` at the end.

    `num_records` counts the records of the file once all waiting ones are written, without its first line.
    """

    def __init__(self, path: Path, size: int = 0, num_records: int = 0) -> None:
        """Open or create the file, which has `num_records`, cut off what follows `size` bytes, and start the thread.

        Raises RunError if the file cannot be opened.
        """
        self.path = path
        self.num_records = num_records
        self._hashes: dict[str, str] = {}
        with translate_error(OSError, lambda error: RunError(f"{path} cannot be opened: {error}")):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._file, size)
            fsync(path.parent)
        self._changed = threading.Condition()
        self._work: list[_Entry | Callable[[], object]] = []
        """In order: records, and what to do once the records before are on disk."""
        self._flushes: list[Future[None]] = []
        self._closing = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def append(self, record: msgspec.Struct, spool: tuple[Path, Group] | None = None) -> None:
        """Append a record and return at once; raises RunError if an earlier write failed.

        `spool` is a group and the path to write it to before the record, whose `hash` is then filled in.
        """
        self._add((record, spool))
        self.num_records += 1

    def replace(self, first: Callable[[], msgspec.Struct], done: Sequence[Done]) -> None:
        """Replace the file and all records so far atomically (I4), by a rename; returns at once.

        The thread calls `first` for the first record. `done` are records of pending groups; their hashes are filled in.
        """
        self._add(partial(self._replace_file, first, done))
        self.num_records = len(done)

    def delete(self, paths: Iterable[Path]) -> None:
        """Delete files after all records so far are on disk; returns at once. Raises RunError as `append` does."""
        self._add(partial(self._delete, list(paths)))

    async def flush(self) -> None:
        """Return when all records so far are on disk. Raises RunError if one cannot be written."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # a cancelled caller can no longer cancel it
        self._flushes = [*(earlier for earlier in self._flushes if not earlier.done()), done]
        self._add(partial(done.set_result, None))
        await asyncio.wrap_future(done)

    def close(self) -> None:
        """Write the waiting records and end the thread. Raises RunError if one cannot be written."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        if self._failure is not None:
            raise RunError(self._failure)

    def _add(self, work: _Entry | Callable[[], object]) -> None:
        with self._changed:
            if self._failure is not None:
                raise RunError(self._failure)
            if self._closing:
                raise RuntimeError(f"{self.path} is closed")
            self._work.append(work)
            self._changed.notify()

    def _run(self) -> None:
        try:
            while work := self._next():
                entries: list[_Entry] = []
                for item in work:
                    if isinstance(item, tuple):
                        entries.append(item)
                    else:
                        self._write(entries)
                        entries = []
                        item()
                self._write(entries)
        except Exception as error:  # noqa: BLE001 - every error of this thread must reach its callers
            with self._changed:
                what = f"{self.path} or its pending groups" if isinstance(error, OSError) else self.path
                self._failure = f"{what} cannot be written: {summarize_exception(error)}"
                for flush in self._flushes:
                    if not flush.done():
                        flush.set_exception(RunError(self._failure))
        finally:
            os.close(self._file)

    def _next(self) -> list[_Entry | Callable[[], object]]:
        """Wait for work; returns none after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._work or self._closing)
            work, self._work = self._work, []
        return work

    def _write(self, entries: Sequence[_Entry]) -> None:
        spooled = [(path, encode_group(group)) for _, spool in entries if spool for path, group in [spool]]
        write_groups(spooled)
        self._hashes |= {path.name: xxh3_128_hexdigest(data) for path, data in spooled}
        if entries:
            rest = memoryview(b"".join(self._line(record) for record, _ in entries))
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)

    def _replace_file(self, first: Callable[[], msgspec.Struct], done: Sequence[Done]) -> None:
        """Write the new file under a temporary name, and rename it."""
        temporary = self.path.with_name(f".tmp-{self.path.name}")
        temporary.write_bytes(b"".join(self._line(record) for record in [first(), *done]))
        fsync(temporary)
        temporary.rename(self.path)
        fsync(self.path.parent)
        earlier, self._file = self._file, os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.close(earlier)

    def _delete(self, paths: Sequence[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
            self._hashes.pop(path.name, None)

    def _line(self, record: msgspec.Struct) -> bytes:
        if isinstance(record, Done) and not record.hash:
            record = msgspec.structs.replace(record, hash=self._hashes[record.file])
        return msgspec.json.encode(record) + b"\n"
