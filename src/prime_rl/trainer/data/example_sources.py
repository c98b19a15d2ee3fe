"""Sources of examples, in memory or streamed, in an order that depends only on the seed and the position.

A source can save and restore its position, so that a resumed run reads the same examples. The position in a data set in
memory is a count; each pass has another permutation. A stream is divided into blocks of `shuffle_buffer` examples, each
permuted by itself; its position is the start of the block and the index in it. docs/design/trainer.md says which parts
of `datasets` this uses, and why not others.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from prime_rl.core.errors import ConfigError
from prime_rl.trainer.data.local_files import LocatedRow

State = dict[str, Any]
"""JSON values."""


class InMemorySource:
    """A data set of known size, with another permutation in each pass unless `seed` is None."""

    def __init__(self, rows: Sequence[LocatedRow], seed: list[int] | None) -> None:
        self._rows, self._seed, self._drawn = rows, seed, 0
        self._order: tuple[int, NDArray[np.integer]] = (-1, np.arange(0))

    @property
    def passes(self) -> int:
        """Number of completed passes."""
        return self._drawn // len(self._rows)

    def draw(self) -> LocatedRow:
        """Return the next example."""
        epoch, place = divmod(self._drawn, len(self._rows))
        if self._order[0] != epoch:
            self._order = (epoch, permutation(len(self._rows), self._seed, epoch))
        self._drawn += 1
        return self._rows[int(self._order[1][place])]

    def state(self) -> State:
        """Return the position, and the size and seed of the data."""
        return {"drawn": self._drawn, "examples": len(self._rows), "seed": self._seed}

    def restore(self, state: State) -> None:
        """Go to a position. Raises ConfigError if the data changed."""
        _check_same(self.state(), state, "examples", "seed")
        self._drawn = state["drawn"]


class RowStream:
    """The rows of a `datasets.IterableDataset`, with their locations."""

    def __init__(self, dataset: Any, locate: Callable[[int, Mapping[str, Any]], LocatedRow]) -> None:
        """`locate` turns an example and its number, from 1, into a row."""
        self.dataset, self._locate = dataset, locate
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

    def __init__(self, stream: RowStream, size: int, seed: list[int] | None) -> None:
        self._stream, self._size, self._seed = stream, size, seed
        self.passes = 0
        """Number of completed passes."""
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
        return {"buffer": self._size, "seed": self._seed, **place}

    def restore(self, state: State) -> None:
        """Seek to a position; reads its block again. Raises ConfigError if the data changed."""
        _check_same(self.state(), state, "buffer", "seed")
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
        self._drawn = np.zeros(len(used), np.int64)

    @property
    def passes(self) -> int:
        """Number of passes that all sources completed."""
        return min(source.passes for source in self._sources)

    def draw(self) -> LocatedRow | None:
        """Return the next example; None at the end of the pass."""
        if self._once is not None and {"all": all, "first": any}[self._once](s.passes for s in self._sources):
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
        for source, position in zip(self._sources, state["sources"], strict=True):
            source.restore(position)


def permutation(size: int, seed: Sequence[int] | None, *more: int) -> NDArray[np.integer]:
    """Return the numbers below `size`, permuted by a seed of several numbers; None keeps the order."""
    return np.arange(size) if seed is None else np.random.default_rng([*seed, *more]).permutation(size)


def _check_same(now: State, then: State, *keys: str) -> None:
    for key in keys:
        if now[key] != then.get(key):
            raise ConfigError(
                f"ckpt.resume_step: the checkpoint was made with other data ({key} {then.get(key)}, now {now[key]}); "
                "resume with the same data and seed"
            )
