"""Batches of packed rows as a resumable stream, in an order that depends only on the seed and the position.

Every rank makes all batches and takes its rows; only the tokenizing is divided (`SharedEncoder`). The position after a
batch contains the position of the source and the tokens of rows that are still being filled, so that a resumed stream
continues exactly. It is independent of the number of ranks.

The position in a data set in memory is a count; each pass has another permutation. A stream is divided into blocks of
`shuffle_buffer` examples, each permuted by itself; its position is the start of the block and the index in it.
docs/design/trainer.md says which parts of `datasets` this uses, and why not others.
"""

import base64
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from itertools import islice
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from prime_rl.core.errors import ConfigError
from prime_rl.storage.wait_for import DeadlineError, start_daemon_future
from prime_rl.trainer.data.chat_rendering import RenderedSequence
from prime_rl.trainer.data.training_files import LocatedRow

State = dict[str, Any]
"""JSON values."""
PackedRow = list[RenderedSequence]
Contents = Sequence[tuple[str, str | None]]
"""Name and content hash of each data set; None if the contents are not known."""
# Rows that are filled at the same time: enough for nearly full rows, few enough to keep the shuffled order.
_OPEN_ROWS = 32


class InMemorySource:
    """A data set of known size, with another permutation in each pass unless `seed` is None."""

    def __init__(self, rows: Sequence[LocatedRow], seed: list[int] | None, contents: Contents = ()) -> None:
        self._rows, self._seed, self._drawn, self._contents = rows, seed, 0, contents
        self._order: tuple[int, NDArray[np.integer]] = (-1, np.arange(0))

    @property
    def passes(self) -> int:
        """Number of completed passes over the examples."""
        return self._drawn // len(self._rows)

    @property
    def started_passes(self) -> int:
        """Number of passes of which an example was drawn, at least 1."""
        return max(1, -(-self._drawn // len(self._rows)))

    def draw(self) -> LocatedRow:
        """Return the next example."""
        epoch, place = divmod(self._drawn, len(self._rows))
        if self._order[0] != epoch:
            self._order = (epoch, permutation(len(self._rows), self._seed, epoch))
        self._drawn += 1
        return self._rows[int(self._order[1][place])]

    def state(self) -> State:
        """Return the position, and the size, seed and contents of the data."""
        data = {"examples": len(self._rows), "seed": self._seed, "contents": [content for _, content in self._contents]}
        return {"drawn": self._drawn, **data}

    def restore(self, state: State) -> None:
        """Go to a position. Raises ConfigError if the data changed."""
        _check_same(self.state(), state, self._contents, "examples", "seed")
        self._drawn = state["drawn"]


class RowStream:
    """The rows of a `datasets.IterableDataset`, with their locations."""

    def __init__(
        self, dataset: Any, locate: Callable[[int, Mapping[str, Any]], LocatedRow], fingerprint: str | None = None
    ) -> None:
        """`locate` turns an example and its number, from 1, into a row; `fingerprint` identifies the contents."""
        self.dataset, self._locate, self.fingerprint = dataset, locate, fingerprint
        self._rewound, self._examples = dataset.state_dict(), iter(dataset)

    def seek(self, position: Any) -> None:
        """Go to a `state_dict` of the data set; None is the start."""
        self.dataset.load_state_dict(position or self._rewound)
        self._examples = iter(self.dataset)

    def take(self, count: int | None, start: int = 0) -> list[LocatedRow]:
        """Return the next `count` rows, fewer at the end; the first one is number `start` + 1."""
        return [self._locate(number, row) for number, row in enumerate(islice(self._examples, count), start + 1)]


class StreamedSource:
    """A stream that is read pass after pass, shuffled within blocks of `size` examples unless `seed` is None."""

    def __init__(self, stream: RowStream, size: int, seed: list[int] | None, contents: Contents = ()) -> None:
        self._stream, self._size, self._seed, self._contents = stream, size, seed, contents
        self.passes = 0
        """Number of completed passes over the examples."""
        self._go_to(-1, None)

    def _go_to(self, block: int, start: Any) -> None:
        """Go behind block `block` of the pass; `start` is the position of the next one."""
        self._stream.seek(start)
        self._block, self._start, self._next, self._place = block, start, start, 0
        self._rows = list[LocatedRow]()

    def draw(self) -> LocatedRow:
        """Return the next example. Raises ConfigError if the data are empty."""
        if self._place == len(self._rows) and not self._read_block():
            if self._block == 0:
                raise ConfigError("data.name: the data are empty")
            self.passes += 1
            self._go_to(-1, None)
            self._read_block()
        self._place += 1
        return self._rows[self._place - 1]

    def _read_block(self) -> bool:
        """Read the next block; return whether it has rows."""
        self._block, self._place, self._start = self._block + 1, 0, self._next
        rows = self._stream.take(self._size, self._block * self._size)
        self._next = self._stream.dataset.state_dict()
        self._rows = [rows[i] for i in permutation(len(rows), self._seed, self.passes, self._block)]
        return bool(rows)

    def state(self) -> State:
        """Return the position: the start of the block, and the index in it."""
        place = {"epoch": self.passes, "block": self._block, "start": self._start, "place": self._place}
        contents = [content for _, content in self._contents]
        return {"buffer": self._size, "seed": self._seed, "contents": contents, **place}

    def restore(self, state: State) -> None:
        """Seek to a position; reads its block again. Raises ConfigError if the data changed."""
        _check_same(self.state(), state, self._contents, "buffer", "seed")
        self.passes, start = state["epoch"], state["start"]
        if isinstance(start, list):  # file and row, in checkpoints of 0.1.0
            self._go_to(-1, None)
            for _ in range(state["block"]):
                self._read_block()
            start = self._next
        self._go_to(max(state["block"], 0) - 1, start)
        if state["block"] >= 0:
            self._read_block()
        if state["place"] > len(self._rows):
            raise ConfigError(
                "ckpt.resume_step: the data are shorter than when the checkpoint was written; resume with the same data"
            )
        self._place = state["place"]


class InterleavedSource:
    """Mixes sources in fixed shares: the next example comes from the source furthest below its share."""

    def __init__(
        self,
        sources: Sequence[InMemorySource | StreamedSource],
        shares: Sequence[float],
        once: Literal["all", "first"] | None = None,
    ) -> None:
        """`shares` may have any sum; a source with share 0 is not used.

        `once` ends after all sources, or the first one, completed a pass; None never ends.
        """
        used = [i for i, share in enumerate(shares) if share > 0]
        self._sources = [sources[i] for i in used]
        self._shares = np.array([shares[i] for i in used]) / sum(shares)
        self._once = once
        self._drawn, self._last_pass = np.zeros(len(used), np.int64), 1

    @property
    def passes(self) -> int:
        """Number of passes that all sources completed."""
        return min(source.passes for source in self._sources)

    def draw(self) -> LocatedRow | None:
        """Return the next example; None at the end of the pass."""
        if self._once is not None and {"all": all, "first": any}[self._once](
            source.passes >= self._last_pass for source in self._sources
        ):
            return None
        chosen = int(np.argmax(self._shares * (self._drawn.sum() + 1) - self._drawn))
        self._drawn[chosen] += 1
        return self._sources[chosen].draw()

    def state(self) -> State:
        """Return the position of every source."""
        return {"drawn": self._drawn.tolist(), "sources": [source.state() for source in self._sources]}

    def restore(self, state: State) -> None:
        """Go to a position. Raises ConfigError if the data changed."""
        if len(state["sources"]) != len(self._sources):
            raise ConfigError(
                f"ckpt.resume_step: the checkpoint was written with {len(state['sources'])} data sets, now there are "
                f"{len(self._sources)}"
            )
        self._drawn = np.array(state["drawn"], np.int64)
        self._last_pass = 1
        for source, position in zip(self._sources, state["sources"], strict=True):
            source.restore(position)
        if len(self._sources) == 1 and isinstance(source := self._sources[0], InMemorySource):
            self._last_pass = source.started_passes  # a run of several passes, whose number was limited by max_steps


def permutation(size: int, seed: Sequence[int] | None, *more: int) -> NDArray[np.integer]:
    """Return the numbers below `size`, permuted by a seed of several numbers; None keeps the order."""
    return np.arange(size) if seed is None else np.random.default_rng([*seed, *more]).permutation(size)


def _check_same(now: State, then: State, contents: Contents, *keys: str) -> None:
    """Compare `keys` of two positions, and the contents of each data set; earlier releases did not record contents."""
    for (name, content), recorded in zip(contents, then.get("contents", ()), strict=False):
        if None not in (content, recorded) and content != recorded:
            raise ConfigError(
                f"ckpt.resume_step: the contents of {name} (data.name) have changed since the checkpoint was written; "
                "resume with the same data, or read the new data from the start with --ckpt.skip-dataloader"
            )
    for key in keys:
        if now[key] != then.get(key):
            raise ConfigError(
                f"ckpt.resume_step: the checkpoint was made with other data ({key} {then.get(key)}, now {now[key]}); "
                "resume with the same data and seed, or read the data from the start with --ckpt.skip-dataloader"
            )


class SequenceStream(Protocol):
    """Token sequences in order, with a position."""

    def draw(self) -> Sequence[RenderedSequence] | None:
        """Return the sequences of the next examples, possibly none; None at the end."""

    def state(self) -> State:
        """Return the position in the stream, for `restore`."""

    def restore(self, state: State) -> None:
        """Continue at a position that `state` returned."""


class Packer:
    """Packs a stream into rows of at most `seq_len` tokens.

    Each sequence goes into the fullest open row with enough space. If there is none and all rows are open, the fullest
    row is closed. Unlike packing by length, this keeps the shuffled order of long and short sequences. With `stack`,
    each sequence is a row.
    """

    def __init__(self, seq_len: int, stack: bool = False, rows: Sequence[PackedRow] = ()) -> None:
        """Start with the open `rows`, none of which is longer than `seq_len`."""
        self.rows: list[PackedRow] = [list(row) for row in rows]
        self._free = [seq_len - sum(map(len, row)) for row in rows]
        self._seq_len, self._stack = seq_len, stack

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
        timeout_seconds: float = 1800,
        on_cut: Callable[[str, int], None] = lambda *_: None,
    ) -> None:
        """Pack `sequences` into batches of `batch_size` rows.

        `timeout_seconds` limits the wait for a stream. `on_cut` is called with the origin and the length of a restored
        sequence that is truncated to `seq_len`.
        """
        self.steps, self._timeout_seconds = steps, timeout_seconds  # the number of batches, None without an end
        self.num_yielded = 0  # number of batches so far, including those before a resume
        self._sequences, self._batch_size = sequences, batch_size
        self._seq_len, self._stack, self._on_cut = seq_len, stack, on_cut
        self._packer, self._pending = Packer(seq_len, stack), deque[RenderedSequence]()
        self._position = self._current_position()
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
        if not futures.wait([future], self._timeout_seconds).done:
            raise DeadlineError(
                f"waited {self._timeout_seconds:.0f} s for the data of batch {self.num_yielded} "
                "(wait_timeout_seconds); check the disk, or the source of a stream"
            )
        batch, position = future.result()
        if not batch:
            raise StopIteration
        self._position, self.num_yielded = position, self.num_yielded + 1
        ends = self.num_yielded == self.steps
        self._next = None if ends else self._start()
        return batch

    def state(self) -> State:
        """Return the position after the last yielded batch, as JSON values that are equal on every rank."""
        rows = [[_to_json(sequence) for sequence in row] for row in self._position["rows"]]
        pending = [_to_json(one) for one in self._position["pending"]]
        return {"batches": self.num_yielded, "source": self._position["source"], "pending": pending, "rows": rows}

    def restore(self, state: State) -> None:
        """Go to a position of `state`, before the first batch.

        Open rows that do not fit present settings are packed again. Sequences that are longer than `seq_len` are
        truncated, and left out if nothing to learn remains. Raises ConfigError if the data changed.
        """
        assert not self._started, "restore must be called before the first batch"
        self._sequences.restore(state["source"])
        open_rows, pending = list[PackedRow](), list[RenderedSequence]()
        for row in map(self._restored, state["rows"]):
            if self._stack or sum(map(len, row)) > self._seq_len:
                pending += row
            elif row:
                open_rows.append(row)
        self._pending = deque(pending + self._restored(state["pending"]))
        self._packer = Packer(self._seq_len, self._stack, open_rows)
        self.num_yielded, self._position = state["batches"], self._current_position()

    def _restored(self, values: Sequence[dict[str, Any]]) -> list[RenderedSequence]:
        """Decode sequences of a checkpoint, truncated to `seq_len`, without those that have nothing to learn."""
        sequences = list(map(_from_json, values))
        for sequence in sequences:
            if len(sequence) > self._seq_len:
                self._on_cut("a sequence of the checkpoint", len(sequence))
        return [cut for sequence in sequences if (cut := truncate(sequence, self._seq_len)) is not None]

    def count(self) -> int:
        """Count the batches by reading to the end; the stream cannot be used afterwards."""
        return sum(1 for _ in iter(lambda: self._make()[0], []))

    def _start(self) -> "Future[tuple[list[PackedRow], State]]":
        """Make the next batch in a thread; at most one at a time."""
        return start_daemon_future(self._make, "data")

    def _make(self) -> tuple[list[PackedRow], State]:
        batch: list[PackedRow] = []
        while len(batch) < self._batch_size and (row := self._next_row()) is not None:
            batch.append(row)
        return batch, self._current_position()

    def _next_row(self) -> PackedRow | None:
        while True:
            while self._pending:
                if row := self._packer.add(self._pending.popleft()):
                    return row
            drawn = self._sequences.draw()
            if drawn is None:
                return self._packer.close_one()
            self._pending.extend(drawn)

    def _current_position(self) -> State:
        rows, pending = [list(row) for row in self._packer.rows], list(self._pending)
        return {"source": self._sequences.state(), "pending": pending, "rows": rows}


def truncate(sequence: RenderedSequence, longest: int) -> RenderedSequence | None:
    """Truncate a sequence to `longest` tokens; None if none of them is trained."""
    if not sequence.loss_mask[:longest].any():
        return None
    return RenderedSequence(sequence.tokens[:longest], sequence.loss_mask[:longest])


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
