"""Batches of packed rows as a resumable stream, independent of the number of ranks.

Every rank makes all batches and takes its rows; only the tokenizing is divided (`rank_sharing`). The position after a
batch contains the position of the source and the tokens of rows that are still being filled, so that a resumed stream
continues exactly.
"""

import base64
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, Self

import numpy as np

from prime_rl.core.daemon_futures import start_daemon_future
from prime_rl.core.errors import ConfigError
from prime_rl.storage.wait_for import DeadlineError
from prime_rl.trainer.data.chat_rendering import RenderedSequence
from prime_rl.trainer.data.example_sources import State

PackedRow = list[RenderedSequence]

# Rows that are filled at the same time: enough for nearly full rows, few enough to keep the shuffled order.
_OPEN_ROWS = 32


class SequenceStream(Protocol):
    """Token sequences in order, with a position."""

    def draw(self) -> Sequence[RenderedSequence] | None:
        """Return the sequences of the next examples, possibly none; None at the end."""

    def state(self) -> State:
        """Return the position."""

    def restore(self, state: State) -> None:
        """Go to a position of `state`."""


class Packer:
    """Packs a stream into rows of at most `seq_len` tokens.

    Each sequence goes into the fullest open row with enough space. If there is none and all rows are open, the fullest
    row is closed. Unlike packing by length, this keeps the shuffled order of long and short sequences. With `stack`,
    each sequence is a row.
    """

    def __init__(self, seq_len: int, stack: bool = False, rows: Sequence[PackedRow] = ()) -> None:
        """Start with the open `rows`. Raises ConfigError if one is longer than `seq_len`."""
        self.rows: list[PackedRow] = [list(row) for row in rows]
        self._free = [seq_len - sum(map(len, row)) for row in rows]
        self._seq_len, self._stack = seq_len, stack
        if min(self._free, default=0) < 0:
            raise ConfigError(
                "ckpt.resume_step: the checkpoint has rows longer than data.seq_len; resume with the earlier value"
            )

    def add(self, sequence: RenderedSequence) -> PackedRow | None:
        """Add a sequence of at most `seq_len` tokens; return the row that was closed for it, if any."""
        if self._stack:
            return [sequence]
        closed = None
        fitting = [i for i, left in enumerate(self._free) if left >= len(sequence)]
        if fitting:
            best = min(fitting, key=self._free.__getitem__)
        else:
            if len(self.rows) == _OPEN_ROWS:
                closed = self._close(self._free.index(min(self._free)))
            best = len(self.rows)
            self.rows.append([])
            self._free.append(self._seq_len)
        self.rows[best].append(sequence)
        self._free[best] -= len(sequence)
        return closed

    def close_one(self) -> PackedRow | None:
        """Close the oldest open row at the end of the stream; None without open rows."""
        return self._close(0) if self.rows else None

    def _close(self, index: int) -> PackedRow:
        self._free.pop(index)
        return self.rows.pop(index)


class PackedStream(Iterator[list[PackedRow]]):
    """Batches in order; the next one is prepared in a thread during training."""

    def __init__(
        self,
        sequences: SequenceStream,
        seq_len: int,
        batch_size: int,
        stack: bool = False,
        steps: int | None = None,
        timeout_s: float = 1800,
    ) -> None:
        """Pack `sequences` into batches of `batch_size` rows; `timeout_s` limits the wait, as a stream may stall."""
        self.steps, self._timeout_s = steps, timeout_s  # the number of batches, None without an end
        self.num_yielded = 0  # number of batches so far, including those before a resume
        self._sequences, self._batch_size = sequences, batch_size
        self._pack: Callable[[Sequence[PackedRow]], Packer] = lambda rows: Packer(seq_len, stack, rows)
        self._packer, self._pending = self._pack(()), deque[RenderedSequence]()
        self._position = self._position_after(0)
        self._started = False
        self._next: Future[tuple[list[PackedRow], State]] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[PackedRow]:
        """Return the next batch; the last one of a pass may be smaller.

        Raises ConfigError if a row is invalid, and DeadlineError if the batch was not ready in time.
        """
        if self.num_yielded == self.steps:
            raise StopIteration
        self._started = True
        future = self._next or self._start()
        if not futures.wait([future], self._timeout_s).done:
            raise DeadlineError(
                f"waited {self._timeout_s:.0f} s for the data of batch {self.num_yielded} (wait_timeout_seconds); "
                "check the disk, or the source of a stream"
            )
        batch, position = future.result()
        if not batch:
            raise StopIteration
        self._position, self.num_yielded = position, position["batches"]
        ends = self.num_yielded == self.steps
        self._next = None if ends else self._start()
        return batch

    def state(self) -> State:
        """Return the position after the last yielded batch, as JSON values that are equal on every rank."""
        rows = [[_to_json(sequence) for sequence in row] for row in self._position["rows"]]
        return {**self._position, "pending": [_to_json(one) for one in self._position["pending"]], "rows": rows}

    def restore(self, state: State) -> None:
        """Go to a position of `state`, before the first batch. Raises ConfigError if the data changed."""
        assert not self._started, "restore must be called before the first batch"
        self._sequences.restore(state["source"])
        self._pending = deque(_from_json(value) for value in state["pending"])
        self._packer = self._pack([[_from_json(value) for value in row] for row in state["rows"]])
        self._position = self._position_after(state["batches"])
        self.num_yielded = state["batches"]

    def count(self) -> int:
        """Count the batches by reading to the end; the stream cannot be used afterwards."""
        return sum(1 for _ in iter(lambda: self._make(0)[0], []))

    def _start(self) -> "Future[tuple[list[PackedRow], State]]":
        """Make the next batch in a thread; at most one at a time."""
        return start_daemon_future(partial(self._make, self.num_yielded + 1), "data")

    def _make(self, number: int) -> tuple[list[PackedRow], State]:
        batch: list[PackedRow] = []
        while len(batch) < self._batch_size and (row := self._next_row()) is not None:
            batch.append(row)
        return batch, self._position_after(number)

    def _next_row(self) -> PackedRow | None:
        while True:
            while self._pending:
                if row := self._packer.add(self._pending.popleft()):
                    return row
            drawn = self._sequences.draw()
            if drawn is None:
                return self._packer.close_one()
            self._pending.extend(drawn)

    def _position_after(self, batches: int) -> State:
        rows, pending = [list(row) for row in self._packer.rows], list(self._pending)
        return {"batches": batches, "source": self._sequences.state(), "pending": pending, "rows": rows}


def pack_all(sequences: Sequence[RenderedSequence], seq_len: int, stack: bool = False) -> list[PackedRow]:
    """Pack all sequences into rows."""
    packer = Packer(seq_len, stack)
    closed = [row for sequence in sequences if (row := packer.add(sequence))]
    return closed + packer.rows


def _to_json(sequence: RenderedSequence) -> dict[str, Any]:
    arrays = {"tokens": sequence.tokens.astype("<i4"), "mask": np.packbits(sequence.loss_mask)}
    return {name: base64.b64encode(array.tobytes()).decode() for name, array in arrays.items()}


def _from_json(value: dict[str, Any]) -> RenderedSequence:
    tokens = np.frombuffer(base64.b64decode(value["tokens"]), "<i4").astype(np.int64)
    mask = np.unpackbits(np.frombuffer(base64.b64decode(value["mask"]), np.uint8), count=len(tokens))
    return RenderedSequence(tokens, mask.astype(np.bool_))
