"""Batches of packed rows as a stream that can be left and entered anywhere.

The batches depend on the seed and the data alone, never on the number of ranks: every rank makes all of them and takes
its rows. The position after a batch holds the position of the source and, as tokens, what was drawn and is not yet in
a batch (rows that are still being filled), so a resumed stream continues bit by bit, whatever the source.
"""

import base64
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from prime_rl.errors import ConfigError
from prime_rl.run.threads import start
from prime_rl.run.wait import DeadlineError
from prime_rl.trainer.sft.chat import TokenSequence
from prime_rl.trainer.sft.sources import State

Row = list[TokenSequence]

# Rows that are being filled at the same time: enough for nearly full rows, few enough to keep the shuffled order.
_OPEN_ROWS = 32


class Sequences(Protocol):
    """Token sequences in order, with a position."""

    def draw(self) -> Sequence[TokenSequence] | None:
        """Those of the next example, none where it has nothing to learn; None at the end."""

    def state(self) -> State:
        """The position."""

    def restore(self, state: State) -> None:
        """Go to a position that `state` told."""


class Packer:
    """Packs a stream into rows of at most `seq_len` tokens.

    Each sequence goes into the fullest open row that holds it; where none does, the fullest of `open_rows` rows is
    closed. Unlike packing sorted by length, this keeps long and short sequences mixed in the order they came in.
    Stacked, a sequence is a row of its own.
    """

    def __init__(self, seq_len: int, stack: bool = False, rows: Sequence[Row] = ()) -> None:
        """Begin with open `rows`, none by default. Raises ConfigError where one is longer than `seq_len`."""
        self.rows: list[Row] = [list(row) for row in rows]
        self._room = [seq_len - sum(map(len, row)) for row in rows]
        self._seq_len, self._stack = seq_len, stack
        if min(self._room, default=0) < 0:
            raise ConfigError("ckpt.resume_step: the checkpoint has longer rows than data.seq_len allows now")

    def add(self, sequence: TokenSequence) -> Row | None:
        """Place a sequence of at most `seq_len` tokens; return the row that had to be closed for it, if any."""
        if self._stack:
            return [sequence]
        closed = None
        fitting = [i for i, left in enumerate(self._room) if left >= len(sequence)]
        if fitting:
            best = min(fitting, key=self._room.__getitem__)
        else:
            if len(self.rows) == _OPEN_ROWS:
                fullest = self._room.index(min(self._room))
                self._room.pop(fullest)
                closed = self.rows.pop(fullest)
            best = len(self.rows)
            self.rows.append([])
            self._room.append(self._seq_len)
        self.rows[best].append(sequence)
        self._room[best] -= len(sequence)
        return closed

    def close_one(self) -> Row | None:
        """Close the oldest open row, at the end of the stream; None where there is none."""
        if not self.rows:
            return None
        self._room.pop(0)
        return self.rows.pop(0)


@dataclass(frozen=True, slots=True)
class _Position:
    """Where the stream is after a batch."""

    batches: int
    source: State
    pending: tuple[TokenSequence, ...]
    rows: tuple[tuple[TokenSequence, ...], ...]


class Batches(Iterator[list[Row]]):
    """Batches in order; the next one is made beside the training of the last.

    Attributes:
        steps: how many there are; None where they never end.
        given: how many were given, counted from the very beginning.
    """

    def __init__(
        self,
        sequences: Sequences,
        seq_len: int,
        batch_size: int,
        stack: bool = False,
        steps: int | None = None,
        timeout_s: float = 1800,
    ) -> None:
        """Take the sequences and how to pack them: rows of `seq_len` tokens, `batch_size` rows a batch.

        Each batch may be waited for `timeout_s` seconds: data that stream from elsewhere may stop to come.
        """
        self.steps, self.given, self._timeout_s = steps, 0, timeout_s
        self._sequences, self._batch_size = sequences, batch_size
        self._pack: Callable[[Sequence[Row]], Packer] = lambda rows: Packer(seq_len, stack, rows)
        self._packer, self._pending = self._pack(()), deque[TokenSequence]()
        self._position = self._here(0)
        self._begun = False
        self._next: Future[tuple[list[Row], _Position]] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Row]:
        """The next batch; smaller than the others if it is the last of a pass.

        Raises:
            ConfigError: a bad row was met.
            DeadlineError: it was not there in time.
        """
        if self.given == self.steps:
            raise StopIteration
        self._begun = True
        coming = self._next or self._start(self.given + 1)
        if not futures.wait([coming], self._timeout_s).done:
            raise DeadlineError(
                f"waited {self._timeout_s:.0f} s for the data of batch {self.given} (wait_timeout_seconds): reading, "
                "or tokenizing them, does not end; where they stream from, or the disk, may hang"
            )
        batch, position = coming.result()
        if not batch:
            raise StopIteration
        self._position, self.given = position, position.batches
        ends = self.given == self.steps
        self._next = None if ends else self._start(self.given + 1)
        return batch

    def state(self) -> State:
        """The position after the last batch that was given, JSON-able and the same on every rank."""
        position = self._position
        return {
            "batches": position.batches,
            "source": position.source,
            "pending": [_to_json(sequence) for sequence in position.pending],
            "rows": [[_to_json(sequence) for sequence in row] for row in position.rows],
        }

    def restore(self, state: State) -> None:
        """Go to a position that `state` told, before the first batch is asked for.

        Raises:
            ConfigError: the data are others than those of the position.
        """
        assert not self._begun, "restore comes before the first batch"
        self._sequences.restore(state["source"])
        self._pending = deque(_from_json(value) for value in state["pending"])
        self._packer = self._pack([[_from_json(value) for value in row] for row in state["rows"]])
        self._position = self._here(state["batches"])
        self.given = state["batches"]

    def count(self) -> int:
        """Go through to the end and count the batches. The stream is of no use afterwards."""
        return sum(1 for _ in iter(lambda: self._make(0)[0], []))

    def _start(self, number: int) -> "Future[tuple[list[Row], _Position]]":
        """Make a batch beside whatever else is done; never two at once."""
        return start(partial(self._make, number), "data")

    def _make(self, number: int) -> tuple[list[Row], _Position]:
        batch: list[Row] = []
        while len(batch) < self._batch_size and (row := self._next_row()) is not None:
            batch.append(row)
        return batch, self._here(number)

    def _next_row(self) -> Row | None:
        while True:
            while self._pending:
                if row := self._packer.add(self._pending.popleft()):
                    return row
            drawn = self._sequences.draw()
            if drawn is None:
                return self._packer.close_one()
            self._pending.extend(drawn)

    def _here(self, batches: int) -> _Position:
        rows = tuple(tuple(row) for row in self._packer.rows)
        return _Position(batches, self._sequences.state(), tuple(self._pending), rows)


def pack_all(sequences: Sequence[TokenSequence], seq_len: int, stack: bool = False) -> list[Row]:
    """Pack what is there into rows."""
    packer = Packer(seq_len, stack)
    closed = [row for sequence in sequences if (row := packer.add(sequence))]
    return closed + packer.rows


def _to_json(sequence: TokenSequence) -> dict[str, Any]:
    tokens, mask = sequence.tokens.astype("<i4"), np.packbits(sequence.loss_mask)
    return {"tokens": _text(tokens), "mask": _text(mask)}


def _text(values: NDArray[np.integer]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _from_json(value: dict[str, Any]) -> TokenSequence:
    tokens = np.frombuffer(base64.b64decode(value["tokens"]), "<i4").astype(np.int64)
    mask = np.unpackbits(np.frombuffer(base64.b64decode(value["mask"]), np.uint8), count=len(tokens))
    return TokenSequence(tokens, mask.astype(np.bool_))
