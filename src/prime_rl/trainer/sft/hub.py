"""Data sets of the Hugging Face hub, mapped from its cache or streamed."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from prime_rl.errors import ConfigError, first_line
from prime_rl.trainer.sft.files import Row
from prime_rl.trainer.sft.sources import Reader


class MappedRows(Sequence[Row]):
    """A data set of the `datasets` library, by row."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset, self._name = dataset, name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return f"row {index + 1} of {self._name}", self._dataset[index]


class StreamReader:
    """An iterable data set of the `datasets` library; a position is its own state."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset, self._name = dataset, name
        self._row = 0
        self._rows = self._read()

    def take(self, count: int) -> list[Row]:
        """The next `count` rows; fewer at the end."""
        return list(islice(self._rows, count))

    def position(self) -> Any:
        """Where the next row stands."""
        return {"row": self._row, "dataset": self._dataset.state_dict()}

    def seek(self, position: Any) -> None:
        """Go to a position."""
        self._row = position["row"]
        self._dataset.load_state_dict(position["dataset"])
        self._rows = self._read()

    def _read(self) -> Iterator[Row]:
        for example in self._dataset:
            self._row += 1
            yield f"row {self._row} of {self._name}", example


def open_mapped(name: str, subset: str | None, split: str) -> MappedRows:
    """Open a data set of the hub, downloading it where it is not in the cache.

    Raises:
        ConfigError: it cannot be loaded.
    """
    return MappedRows(_load(name, subset, split, streaming=False), name)


def open_stream(name: str, subset: str | None, split: str) -> Callable[[int], Reader]:
    """Return what opens a reader of a data set of the hub.

    Raises:
        ConfigError: it cannot be loaded.
    """
    _load(name, subset, split, streaming=True)  # what is wrong with the name is told at once
    return lambda _: StreamReader(_load(name, subset, split, streaming=True), name)


def _load(name: str, subset: str | None, split: str, streaming: bool) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(name, subset, split=split, streaming=streaming)
    except (OSError, ValueError, RuntimeError) as error:  # not found, no such configuration or split, a script
        said = first_line(error)
        raise ConfigError(f"data.name: cannot load {name!r} as a local path or from the hub: {said}") from error
