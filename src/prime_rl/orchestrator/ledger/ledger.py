"""The ledger: an append-only file of what was drawn, dispatched, finished, dropped and shipped.

Draws depend only on earlier draws and ships, so replaying the ledger restores the same example stream (`replay`). This
keeps every position exactly once (I3) across restarts. The ledger is flushed before each batch is renamed into place:

    await ledger.flush()              everything that the batch builds on is on disk
    write_batch(...)                  the rename ships it; the manifest is the proof
    ledger.shipped(step, group_ids)   before the next batch is chosen

After a crash the ledger is a prefix of the decisions. Work after that prefix was sampled but never trained on. The last
ship may be missing from the ledger; then the batch's manifest proves it.
"""

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from prime_rl.core.errors import RunError
from prime_rl.core.types import Group
from prime_rl.orchestrator.example_stream import DrawnExample, ExampleStream
from prime_rl.orchestrator.ledger.ledger_records import (
    AppendLog,
    Done,
    Drawn,
    Dropped,
    Issued,
    LedgerSnapshot,
    PendingGroupError,
    Positions,
    Record,
    Shipped,
    apply_record,
    clean_spool,
    mean_reward,
    read_group,
)
from prime_rl.storage.artifact import MANIFEST, check_format
from prime_rl.storage.paths import RunPaths, steps_in

FORMAT = "prime_rl.ledger/1"
_MOST_RECORDS = 20_000
"""After this many records (about 5,000 groups, which a restart reads in a second) the file is replaced, if it then has
less than half of them."""


class LedgerHeader(msgspec.Struct, frozen=True, tag="started", tag_field="record"):
    """The first line: what the stream depends on, and the state before the next record (None: a new run)."""

    format: str
    branch: int
    identity: dict[str, Any]
    base: dict[str, Any] | None = None


class Ledger:
    """Draws from the stream and records what happens to each position. Only `flush` and `close` wait for the disk.

    Every method raises RunError if an earlier record could not be written, and ValueError if a call contradicts an
    earlier one (a group that ends twice, a batch out of order).
    """

    def __init__(
        self, paths: RunPaths, branch: int, stream: ExampleStream, positions: Positions, log: AppendLog
    ) -> None:
        """Use `start` or `resume`, which keep `stream` and `positions` consistent."""
        self.stream = stream
        self.positions = positions
        self._paths = paths
        self._branch = branch
        self._log = log

    @classmethod
    def start(
        cls, paths: RunPaths, branch: int, stream: ExampleStream, base: Mapping[str, Any] | None = None
    ) -> "Ledger":
        """Start the ledger of a new branch with a `stream` at position 0, and delete earlier pending groups.

        `base` is the `LedgerSnapshot.state_after` of the checkpoint where the branch starts. The groups that were
        finished must then be recorded again (`done`), and those in flight issued again. Raises RunError if the
        branch already has a ledger, ConfigError if `base` belongs to another configuration.
        """
        if _read_lines(paths.ledger(branch))[0]:
            raise RunError(f"{paths.ledger(branch)} exists already: branch {branch} was started before")
        positions = Positions(base and base["positions"])
        if base is not None:
            stream.restore(base["stream"])
        clean_spool(paths.spool_dir, keep=())
        paths.spool_dir.mkdir(parents=True, exist_ok=True)
        log = AppendLog(paths.ledger(branch))
        log.append(LedgerHeader(FORMAT, branch, stream.identity(), None if base is None else dict(base)))
        return cls(paths, branch, stream, positions, log)

    @classmethod
    def resume(cls, paths: RunPaths, stream: ExampleStream, state: "LedgerState") -> "Ledger":
        """Continue a branch after `read_ledger`; the caller issues `positions.unfinished` again. Raises as `replay`."""
        replay(stream, state)
        paths.spool_dir.mkdir(parents=True, exist_ok=True)
        clean_spool(paths.spool_dir, keep=[paths.spool(group_id) for group_id in state.finished])
        log = AppendLog(paths.ledger(state.branch), state.size, len(state.records) - len(state.unrecorded))
        for record in state.unrecorded:
            log.append(record)
        return cls(paths, state.branch, stream, state.positions, log)

    def draw(self, can_start: Callable[[int], bool] = lambda env: True) -> DrawnExample:
        """Draw the next position of the stream (`ExampleStream.draw`)."""
        draw = self.stream.draw(can_start)
        self._record(Drawn(draw.group_id, draw.env, draw.example))
        return draw

    def issued(self, group_id: int, version: int, deadline: int) -> None:
        """Record that a position is dispatched, for the first time or again."""
        self._record(Issued(group_id, version, deadline))

    def done(self, group: Group) -> None:
        """Record that a group is finished, and write it to disk."""
        path = self._paths.spool(group.group_id)
        record = Done(group.group_id, mean_reward(group.rewards), path.name)
        self.positions.apply(record)
        self._log.append(record, (path, group))

    def dropped(self, group_id: int, reason: str, rewards: NDArray[np.float64] | None = None) -> None:
        """Record that a position will not be trained on; `rewards` [G] update the difficulty of its example."""
        self._record(Dropped(group_id, reason, None if rewards is None else mean_reward(rewards)))

    def shipped(self, step: int, group_ids: Sequence[int]) -> None:
        """Record that batch `step` was renamed into place, and update the stream with all that ended since the last.

        The files of its groups are deleted once the record is on disk.
        """
        self._record(Shipped(step, sorted(group_ids)))
        self._log.delete([self._paths.spool(group_id) for group_id in group_ids])
        if self._log.num_records >= max(_MOST_RECORDS, 2 * len(self.positions.open)):
            self._compact()

    def snapshot(self) -> LedgerSnapshot:
        """Return the current state for another thread."""
        return LedgerSnapshot(self.stream.copy(), self.positions.copy())

    async def flush(self) -> None:
        """Return when all records so far are on disk, and their groups are written."""
        await self._log.flush()

    def close(self) -> None:
        """Write the remaining records and end the writer thread; blocks."""
        self._log.close()

    def _compact(self) -> None:
        """Replace the file by one that starts with the current state, right after a ship.

        Only the manifests of the batches and the metrics then show the earlier positions.
        """
        snapshot, branch, identity = self.snapshot(), self._branch, self.stream.identity()
        done = [position.done for position in snapshot.positions.open.values() if position.done is not None]
        self._log.replace(lambda: LedgerHeader(FORMAT, branch, identity, snapshot.state()), done)

    def _record(self, record: Record) -> None:
        apply_record(self.positions, record, self.stream)
        self._log.append(record)


@dataclass(frozen=True, slots=True)
class LedgerState:
    """The state that the ledger, the manifests of the batches and the pending groups give together.

    Attributes:
        size: bytes of the complete lines of the file.
        identity: what the stream depended on.
        base: the state before the first record; None at the beginning of a run.
        records: in order, with `unrecorded` at the end.
        unrecorded: ships that only a manifest proves.
        positions: the state after the records.
        finished: by group_id.
        damaged: group_id -> why a finished group cannot be read; it counts as unfinished.
    """

    branch: int
    size: int
    identity: dict[str, Any]
    base: dict[str, Any] | None
    records: list[Record]
    unrecorded: list[Shipped]
    positions: Positions
    finished: dict[int, Group] = field(default_factory=dict)
    damaged: dict[int, str] = field(default_factory=dict)


def read_ledger(paths: RunPaths, branch: int) -> LedgerState | None:
    """Read the ledger of a branch, without a truncated last line; None if it has no complete line.

    Raises RunError if the ledger is damaged before its end, or does not account for batches that were shipped.
    """
    path = paths.ledger(branch)
    lines, size = _read_lines(path)
    if not lines:
        if _shipped_batches(paths, branch):
            raise RunError(f"{path} is missing or empty, but {paths.rollouts_dir} holds batches of branch {branch}")
        return None
    places = [f"{path}, line {number}" for number in range(1, len(lines) + 1)]
    with _located_errors(places[0]):
        header = _HEADER.decode(lines[0])
    check_format(path, header.format, FORMAT)
    records = list[Record]()
    for line, place in zip(lines[1:], places[1:], strict=True):
        with _located_errors(place):
            records.append(_RECORD.decode(line))
    positions = Positions(header.base and header.base["positions"])
    batches = _shipped_batches(paths, branch, positions.next_step)
    unrecorded = _find_unrecorded(path, positions.next_step, records, batches)
    records += unrecorded
    places += [f"the batches' manifests and {path} disagree"] * len(unrecorded)
    for record, place in zip(records, places[1:], strict=True):
        with _located_errors(place):
            positions.apply(record)
    state = LedgerState(branch, size, header.identity, header.base, records, unrecorded, positions)
    with _paused_garbage_collection():
        for group_id, position in positions.open.items():
            if position.done is not None:
                try:
                    state.finished[group_id] = read_group(paths.spool_dir / position.done.file, position.done.hash)
                except PendingGroupError as error:
                    state.damaged[group_id] = str(error)
                    positions.reopen(group_id)
    return state


@contextmanager
def _paused_garbage_collection() -> Iterator[None]:
    """Avoid collections while millions of objects are made, none of which is garbage: they take half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def replay(stream: ExampleStream, state: LedgerState) -> None:
    """Bring `stream` from position 0 to the state after the records.

    Raises ConfigError if its configuration differs from the ledger's, RunError if it draws another example.
    """
    stream.check_identity(state.identity)
    positions = Positions(state.base and state.base["positions"])
    if state.base is not None:
        stream.restore(state.base["stream"])
    for record in state.records:
        if isinstance(record, Drawn):
            # For an environment that no longer exists, all may start; the error below then names the difference.
            wanted = {record.env} if record.env < len(stream.sources) else set(range(len(stream.sources)))
            draw = stream.draw(wanted.__contains__)
            if draw != DrawnExample(record.group_id, record.env, record.example):
                raise RunError(
                    f"position {record.group_id} of the stream was example {record.example} of environment "
                    f"{record.env} and is drawn as {draw} now: the configuration, the seed or the program changed "
                    "since the run began; restore them, or start a new run"
                )
        apply_record(positions, record, stream)


def _read_lines(path: Path) -> tuple[list[bytes], int]:
    """Return the complete lines and their size in bytes."""
    data = path.read_bytes() if path.exists() else b""
    size = data.rfind(b"\n") + 1
    return data[:size].splitlines(), size


@contextmanager
def _located_errors(place: str) -> Iterator[None]:
    try:
        yield
    except (msgspec.DecodeError, ValueError) as error:
        raise RunError(f"{place}: {error}") from None


def _shipped_batches(paths: RunPaths, branch: int, first: int = 0) -> dict[int, list[int]]:
    """Return step -> group_ids from the manifests of the branch, which outlive the rows, from batch `first` on."""
    batches = {}
    for step in (step for step in steps_in(paths.rollouts_dir) if step >= first):
        file = paths.rollouts(step) / MANIFEST
        try:
            with suppress(FileNotFoundError):  # deleting a batch starts with its manifest
                manifest = json.loads(file.read_bytes())
                if manifest["branch"] == branch:
                    batches[step] = sorted(manifest["group_ids"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{file} is not the manifest of a batch: {error!r}") from None
    return batches


def _find_unrecorded(
    path: Path, first_step: int, records: Sequence[Record], batches: Mapping[int, list[int]]
) -> list[Shipped]:
    """Return the ships that only manifests prove; they follow those in the ledger."""
    recorded = {record.step: record.group_ids for record in records if isinstance(record, Shipped)}
    for step, group_ids in recorded.items():
        if batches.get(step, group_ids) != group_ids:
            raise RunError(f"batch {step} holds groups {group_ids} in {path}, but {batches[step]} in its manifest")
    last = max(recorded, default=first_step - 1)
    missing = sorted(step for step in batches if step not in recorded)
    if missing != list(range(last + 1, last + 1 + len(missing))):
        raise RunError(f"{path} has no records of the shipped batches {missing}; its last batch is {last}")
    return [Shipped(step, batches[step]) for step in missing]


_HEADER: "msgspec.json.Decoder[LedgerHeader]" = msgspec.json.Decoder(LedgerHeader)
_RECORD: "msgspec.json.Decoder[Record]" = msgspec.json.Decoder(Record)
