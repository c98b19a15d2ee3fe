"""The records of the ledger, the states of a position that they change, and the thread that writes them.

    drawn ----> issued ----> done ----> shipped        drawn: waits in the lookahead
                   \\           \\                       issued: dispatched, with a deadline
                    `-----------`------> dropped       done: finished; its group is written

`Positions.apply` refuses a record that contradicts an earlier one, so no position is shipped twice, or dropped and
shipped (I3). The running process and the one that reads its ledger after a crash use the same code.

The file is always a prefix of the appended records, except for a truncated last line. A group is written before its
record, so that a restart does not sample it again; the record has the hash of its file (I4). Groups are msgpack with
their arrays as raw bytes. All waiting records are written with one write and one fsync (group commit). Only `flush`
waits for the disk. The first error ends the thread, and every later call raises it.
"""

import asyncio
import copy
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
from xxhash import xxh3_128_hexdigest

from prime_rl.core.errors import RunError, summarize_exception, translate_error
from prime_rl.core.types import Group
from prime_rl.orchestrator.example_stream import DrawnExample, Ended, ExampleStream
from prime_rl.storage.artifact import fsync


class Drawn(msgspec.Struct, frozen=True, tag="drawn", tag_field="record"):
    """A position was drawn from the stream."""

    group_id: int
    env: int
    example: int


class Issued(msgspec.Struct, frozen=True, tag="issued", tag_field="record"):
    """A position was dispatched to a server at `version`; `deadline` is the last batch that it may join."""

    group_id: int
    version: int
    deadline: int


class Done(msgspec.Struct, frozen=True, tag="done", tag_field="record"):
    """A group is finished and stored in `file` with this hash; `reward` is its mean."""

    group_id: int
    reward: float | None
    file: str
    hash: str = ""


class Dropped(msgspec.Struct, frozen=True, tag="dropped", tag_field="record"):
    """A position will not be trained on; `reward` is the mean of its group if it was scored."""

    group_id: int
    reason: str
    reward: float | None = None


class Shipped(msgspec.Struct, frozen=True, tag="shipped", tag_field="record"):
    """Batch `step` was shipped with these groups, ascending."""

    step: int
    group_ids: list[int]


Record = Drawn | Issued | Done | Dropped | Shipped


@dataclass(slots=True)
class Position:
    """A position that has not ended; version and deadline of its last dispatch are None while it waits."""

    draw: DrawnExample
    version: int | None = None
    deadline: int | None = None
    done: Done | None = None


class Positions:
    """All positions that have not ended, and those that ended since the last ship.

    Attributes:
        cursor: the next position to be drawn.
        next_step: the next batch to ship.
        open: by group_id, ascending.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        """Start at position 0, or at an earlier `state`."""
        state = state or {"cursor": 0, "next_step": 0, "open": []}
        self.cursor: int = state["cursor"]
        self.next_step: int = state["next_step"]
        self.open = {item[0]: Position(DrawnExample(*item[:3]), *item[3:]) for item in state["open"]}
        self._dropped: list[Ended] = []

    @property
    def unfinished(self) -> list[DrawnExample]:
        """Positions that were dispatched and did not end, ascending: after a restart issued again before any other."""
        return [p.draw for p in self.open.values() if p.deadline is not None and p.done is None]

    @property
    def waiting(self) -> list[DrawnExample]:
        """Positions that were drawn and never dispatched, ascending: the lookahead."""
        return [p.draw for p in self.open.values() if p.deadline is None]

    def apply(self, record: Record) -> list[Ended] | None:
        """Apply a record; raise ValueError if it contradicts an earlier one.

        Returns:
            For `Shipped` the positions that ended since the last ship, by ascending group_id; else None.
        """
        match record:
            case Drawn(group_id):
                if group_id != self.cursor:
                    raise ValueError(f"position {group_id} is drawn, but the next is {self.cursor}")
                self.open[group_id] = Position(DrawnExample(group_id, record.env, record.example))
                self.cursor += 1
            case Issued(group_id):
                position = self._find(group_id, "issued")
                position.version, position.deadline = record.version, record.deadline
                position.done = None  # dispatched again: its group could not be read
            case Done(group_id):
                if (position := self._find(group_id, "done")).deadline is None:
                    raise ValueError(f"group {group_id} is done, but was never issued")
                position.done = record
            case Dropped(group_id):
                position = self._find(group_id, "dropped")
                self._dropped.append(Ended(position.draw, record.reward, record.reason))
                del self.open[group_id]
            case Shipped():
                return self._ship(record)
        return None

    def reopen(self, group_id: int) -> None:
        """Revoke that the group is done: it cannot be read, or does not fit changed settings."""
        self.open[group_id].done = None

    def state(self) -> dict[str, Any]:
        """Return the JSON-able argument of the constructor, right after a ship; finished groups count as issued."""
        return {
            "cursor": self.cursor,
            "next_step": self.next_step,
            "open": [[p.draw.group_id, p.draw.env, p.draw.example, p.version, p.deadline] for p in self.open.values()],
        }

    def copy(self) -> "Positions":
        """Return an independent copy."""
        copied = copy.copy(self)
        copied.open = {group_id: replace(position) for group_id, position in self.open.items()}
        copied._dropped = self._dropped.copy()
        return copied

    def _ship(self, record: Shipped) -> list[Ended]:
        if record.step != self.next_step:
            raise ValueError(f"batch {record.step} is shipped, but the next is {self.next_step}")
        ended = self._dropped
        for group_id in record.group_ids:
            position = self._find(group_id, "shipped")
            if position.done is None:
                raise ValueError(f"group {group_id} is shipped, but is not done")
            ended.append(Ended(position.draw, position.done.reward, None))
            del self.open[group_id]
        self._dropped = []
        self.next_step += 1
        return sorted(ended, key=lambda end: end.draw.group_id)

    def _find(self, group_id: int, event: str) -> Position:
        if group_id not in self.open:
            reason = "has ended before" if group_id < self.cursor else "was never drawn"
            raise ValueError(f"group {group_id} is {event}, but {reason}")
        return self.open[group_id]


def mean_reward(rewards: Any) -> float | None:
    """Return the mean of a group's rewards; None if it is not finite, which JSON cannot hold."""
    mean = float(rewards.mean())
    return mean if math.isfinite(mean) else None


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """An independent copy of a ledger's state, from which another thread builds a checkpoint or a new file."""

    stream: ExampleStream
    positions: Positions

    def state_after(self, step: int, group_ids: Sequence[int]) -> dict[str, Any]:
        """Return the state that follows if batch `step` ships with these groups; changes the snapshot."""
        apply_record(self.positions, Shipped(step, sorted(group_ids)), self.stream)
        return self.state()

    def state(self) -> dict[str, Any]:
        """Return the JSON-able `base` of `Ledger.start`, right after a ship."""
        return {"stream": self.stream.state(), "positions": self.positions.state()}


def apply_record(positions: Positions, record: Record, stream: ExampleStream) -> None:
    """Apply a record; a ship updates the stream with the positions that ended since the last one."""
    ended = positions.apply(record)
    if ended is not None:
        stream.shipped(ended)


_SPOOL_FORMAT = "prime_rl.spool/1"
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
        for path, group in (spool for _, spool in entries if spool):
            data = encode_group(group)
            path.write_bytes(data)  # not synced: the hash reveals a file that a crash damages
            self._hashes[path.name] = xxh3_128_hexdigest(data)
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


class PendingGroupError(ValueError):
    """The file of a group is missing or damaged; the message names it."""


class _Spooled(msgspec.Struct, frozen=True):
    format: str
    group: Group


def encode_group(group: Group) -> bytes:
    """Return `group` as bytes."""
    try:
        return _ENCODER.encode(_Spooled(_SPOOL_FORMAT, group))
    except UnicodeEncodeError:  # a lone surrogate, which JSON in a completion can contain
        rollouts = []
        for rollout in group.rollouts:
            text = tuple((role, content.encode("utf-8", "replace").decode()) for role, content in rollout.text)
            rollouts.append(replace(rollout, text=text))
        return _ENCODER.encode(_Spooled(_SPOOL_FORMAT, replace(group, rollouts=tuple(rollouts))))


def decode_group(data: bytes, path: Path) -> Group:
    """Invert `encode_group`; the arrays are read-only views of `data`, which comes from `path`."""
    try:
        spooled = _DECODER.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise PendingGroupError(f"{path} is not a group: {error}") from None
    if spooled.format != _SPOOL_FORMAT:
        raise PendingGroupError(f"{path} has format {spooled.format!r}, expected {_SPOOL_FORMAT!r}")
    return spooled.group


def read_group(path: Path, expected_hash: str) -> Group:
    """Read a pending group; raises PendingGroupError if the file is missing or damaged."""
    if not path.exists():
        raise PendingGroupError(f"{path} is missing")
    data = path.read_bytes()
    if (found := xxh3_128_hexdigest(data)) != expected_hash:
        raise PendingGroupError(f"{path} has hash {found}, expected {expected_hash}")
    return decode_group(data, path)


def clean_spool(directory: Path, keep: Iterable[Path]) -> None:
    """Delete the files of groups that have ended and of interrupted writes: all except `keep`."""
    kept = set(keep)
    if directory.is_dir():
        for path in directory.iterdir():
            if path not in kept and path.name.removeprefix(".tmp-").startswith("group_"):  # .tmp-: of version 0.1.0
                path.unlink()


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, np.ascontiguousarray(value).data if value.size else b""]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a group cannot hold a {type(value).__name__}")


def _decode(expected: type, value: Any) -> Any:
    dtype, shape, data = value
    if dtype != (wanted := _dtype_of(expected)):
        raise ValueError(f"an array is {dtype}, expected {wanted}")
    return np.frombuffer(data, dtype).reshape(shape)


@cache  # a restart decodes millions of arrays
def _dtype_of(annotation: type) -> str:
    (wanted,) = get_args(get_args(annotation)[1])
    return np.dtype(wanted).str


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode)
_DECODER = msgspec.msgpack.Decoder(_Spooled, dec_hook=_decode)
