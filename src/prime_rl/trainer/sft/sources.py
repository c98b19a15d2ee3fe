"""Where examples come from: data sets in memory or streamed, in an order that the seed and the position alone fix.

Every source knows its position and can be put there again, so that a resumed run sees what an uninterrupted one would
have seen. A data set in memory is permuted anew in each pass; its position is a count. A stream is cut into blocks of
`shuffle_buffer` examples, each permuted by itself; its position is where the block begins and the place in it.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from prime_rl.errors import ConfigError
from prime_rl.trainer.sft.files import Row, read_rows

State = dict[str, Any]
"""JSON-able."""


class Source(Protocol):
    """Examples without end."""

    @property
    def passes(self) -> int:
        """How often it was gone through."""

    def draw(self) -> Row:
        """The next example."""

    def state(self) -> State:
        """The position."""

    def restore(self, state: State) -> None:
        """Go to a position that `state` told."""


class InMemory:
    """A data set of known size, permuted anew in each pass unless `seed` is None."""

    def __init__(self, rows: Sequence[Row], chosen: NDArray[np.integer], seed: Sequence[int] | None) -> None:
        """Take the rows and which of them to use."""
        self._rows, self._chosen, self._seed = rows, chosen, seed
        self._drawn = 0
        self._order: tuple[int, NDArray[np.integer]] = (-1, chosen)

    @property
    def passes(self) -> int:
        """Whole passes that were drawn."""
        return self._drawn // len(self._chosen)

    def draw(self) -> Row:
        """The next example."""
        epoch, place = divmod(self._drawn, len(self._chosen))
        if self._order[0] != epoch:
            self._order = (epoch, permuted(self._chosen, self._seed, epoch))
        self._drawn += 1
        return self._rows[int(self._order[1][place])]

    def state(self) -> State:
        """The position, and what it is a position in."""
        return {"drawn": self._drawn, "examples": len(self._chosen), "seed": _listed(self._seed)}

    def restore(self, state: State) -> None:
        """Go to a position. Raises ConfigError where the data are others."""
        _check_same(self.state(), state, "examples", "seed")
        self._drawn = state["drawn"]


class Reader(Protocol):
    """Rows that are read lazily, once from front to back."""

    def take(self, count: int) -> list[Row]:
        """The next `count` rows; fewer at the end."""

    def position(self) -> Any:
        """Where the next row stands, JSON-able."""

    def seek(self, position: Any) -> None:
        """Go to a position."""


class Streamed:
    """A data set that is read lazily, pass after pass, shuffled within blocks unless `seed` is None."""

    def __init__(self, reader: Callable[[int], Reader], block: int, seed: Sequence[int] | None) -> None:
        """Take what opens the reader of a pass, and the examples in a block."""
        self._open, self._size, self._seed = reader, block, seed
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self._epoch, self._block, self._place = epoch, -1, 0
        self._reader, self._rows = self._open(epoch), list[Row]()
        self._start = self._reader.position()

    @property
    def passes(self) -> int:
        """Passes that were found to have ended."""
        return self._epoch

    def draw(self) -> Row:
        """The next example. Raises ConfigError where there is none at all."""
        if self._place == len(self._rows):
            self._fill()
        self._place += 1
        return self._rows[self._place - 1]

    def _fill(self) -> None:
        self._read_block()
        if not self._rows:
            if self._block == 0:
                raise ConfigError("data.name: the data are empty")
            self._begin(self._epoch + 1)
            self._read_block()

    def _read_block(self) -> None:
        self._block, self._place, self._start = self._block + 1, 0, self._reader.position()
        rows = self._reader.take(self._size)
        order = permuted(np.arange(len(rows)), self._seed, self._epoch, self._block)
        self._rows = [rows[i] for i in order]

    def state(self) -> State:
        """The position: where the block begins, and the place in it."""
        fixed = {"buffer": self._size, "seed": _listed(self._seed)}
        return {**fixed, "epoch": self._epoch, "block": self._block, "start": self._start, "place": self._place}

    def restore(self, state: State) -> None:
        """Go to a position: read its block again. Raises ConfigError where the data are others."""
        _check_same(self.state(), state, "buffer", "seed")
        self._begin(state["epoch"])
        if state["block"] >= 0:
            self._reader.seek(state["start"])
            self._block = state["block"] - 1
            self._read_block()
        if state["place"] > len(self._rows):
            raise ConfigError("ckpt.resume_step: the data are shorter than those the checkpoint was made with")
        self._place = state["place"]


class FileReader:
    """Local files one after the other; a position is (file, row)."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self.seek([0, 0])

    def take(self, count: int) -> list[Row]:
        """The next `count` rows; fewer at the end."""
        return list(islice(self._rows, count))

    def position(self) -> list[int]:
        """File and row of the next row."""
        return [self._file, self._row]

    def seek(self, position: Sequence[int]) -> None:
        """Go to a position."""
        self._file, self._row = position
        self._rows = self._read()

    def _read(self) -> Iterator[Row]:
        while self._file < len(self._files):
            for row in read_rows(self._files[self._file], self._row):
                self._row += 1
                yield row
            self._file, self._row = self._file + 1, 0


class Interleaved:
    """Several sources in fixed shares: each example comes from the source that is furthest behind its share."""

    def __init__(
        self, sources: Sequence[Source], shares: Sequence[float], once: Literal["all", "first"] | None = None
    ) -> None:
        """Take the sources and their shares.

        Args:
            sources: at least one.
            shares: not negative, of any sum; a source without a share is never drawn from.
            once: end when all, or the first, of the sources were gone through; None never ends.
        """
        used = [i for i, share in enumerate(shares) if share > 0]
        self._sources = [sources[i] for i in used]
        self._shares = np.array([shares[i] for i in used]) / sum(shares)
        self._once = once
        self._drawn = np.zeros(len(used), np.int64)

    @property
    def passes(self) -> int:
        """Passes through the source that was gone through least often."""
        return min(source.passes for source in self._sources)

    def draw(self) -> Row | None:
        """The next example; None when the pass is over."""
        if self._once is not None and {"all": all, "first": any}[self._once](s.passes for s in self._sources):
            return None
        chosen = int(np.argmax(self._shares * (self._drawn.sum() + 1) - self._drawn))
        self._drawn[chosen] += 1
        return self._sources[chosen].draw()

    def state(self) -> State:
        """The position of every source."""
        return {"drawn": self._drawn.tolist(), "sources": [source.state() for source in self._sources]}

    def restore(self, state: State) -> None:
        """Go to a position. Raises ConfigError where the data are others."""
        if len(state["sources"]) != len(self._sources):
            raise ConfigError(
                f"ckpt.resume_step: the checkpoint was made with {len(state['sources'])} data sets, now there are "
                f"{len(self._sources)}"
            )
        self._drawn = np.array(state["drawn"], np.int64)
        for source, position in zip(self._sources, state["sources"], strict=True):
            source.restore(position)


def permuted(values: NDArray[np.integer], seed: Sequence[int] | None, *more: int) -> NDArray[np.integer]:
    """Permute by a seed of several numbers; not at all where it is None."""
    return values if seed is None else np.random.default_rng([*seed, *more]).permutation(values)


def _listed(seed: Sequence[int] | None) -> list[int] | None:
    return None if seed is None else list(seed)


def _check_same(now: State, then: State, *keys: str) -> None:
    for key in keys:
        if now[key] != then.get(key):
            raise ConfigError(
                f"ckpt.resume_step: the checkpoint was made with other data ({key} {then.get(key)}, now {now[key]}); "
                "resume with the same data and seed"
            )
