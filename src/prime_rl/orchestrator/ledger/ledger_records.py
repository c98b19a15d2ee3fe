"""The records of the ledger, and the states of a position that they change. No I/O, no clock.

    drawn ----> issued ----> done ----> shipped        drawn: waits in the lookahead
                   \\           \\                       issued: dispatched, with a deadline
                    `-----------`------> dropped       done: finished; its group is written

`Positions.apply` refuses a record that contradicts an earlier one, so no position is shipped twice, or dropped and
shipped (I3). The running process and the one that reads its ledger after a crash use the same code.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from prime_rl.orchestrator.data.example_stream import DrawnExample, Ended, ExampleStream


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
