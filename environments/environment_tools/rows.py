"""Rows of data from a local file or the Hugging Face hub, and errors that name the source and the row."""

import csv
import io
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

Row = Mapping[str, Any]
Example = TypeVar("Example")

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character, which cannot be encoded."""


def read_file(path: str | Path) -> list[Row]:
    """Read the rows of a file.

    The formats are `.csv` (with a header), `.parquet`, `.json` (a list of objects), and, with any other suffix, one
    JSON object a line.

    Raises:
        ValueError: there is no such file, or it is malformed; the message names file and row.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if path.suffix == ".parquet":
        return _read_parquet(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    if path.suffix == ".csv":
        return _read_csv(path, text)
    if path.suffix == ".json":
        rows = _parse(text, str(path))
        if not isinstance(rows, list):
            raise ValueError(f"{path} is not a JSON list of rows; write one object per line to a .jsonl file instead")
    else:
        # Not splitlines(): JSON text may hold other line separators than the newline.
        lines = [line for line in text.split("\n") if line.strip()]
        rows = [_parse(line, f"{path}, row {number}") for number, line in enumerate(lines, 1)]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number}: not a JSON object but {_short(row)}")
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def _read_csv(path: Path, text: str) -> list[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header, *lines = [line for line in reader if line] or [[]]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: not CSV ({error})") from error
    if duplicates := [column for index, column in enumerate(header) if column in header[:index]]:
        raise ValueError(f"{path} has two columns {duplicates[0]!r}")
    for number, line in enumerate(lines, 1):
        if len(line) != len(header):
            raise ValueError(
                f"{path}, row {number}: {len(line)} values for {len(header)} columns; quote text with commas"
            )
    if not lines:
        raise ValueError(f"{path} has no rows")
    return [dict(zip(header, line, strict=True)) for line in lines]


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file: {_short(str(error))}") from error
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def read_hub(name: str, subset: str | None, split: str, cache_dir: str | None = None) -> Iterable[Row]:
    """Open one split of a data set of the Hugging Face hub. Its rows stay on the disk until they are iterated over.

    Raises:
        ValueError: the hub cannot be reached, or has no such data set, subset or split.
    """
    from datasets import load_dataset

    try:
        rows: Iterable[Row] = load_dataset(name, subset, split=split, cache_dir=cache_dir)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"the data set {name} of the hub cannot be loaded: {_short(str(error))}; connect this machine to the hub, "
            "or pass local data (see the environment's README.md)"
        ) from None
    return rows


@dataclass(frozen=True)
class Source:
    """Where rows come from: a file if `path` is given, else a split of a data set of the hub."""

    path: str | None = None
    name: str = ""
    subset: str | None = None
    split: str = "train"
    cache_dir: str | None = None

    def examples(self, convert: Callable[[Row], Example | None]) -> list[Example]:
        """Read and convert the rows. A malformed row of a file is an error. A malformed row of the hub, which
        the user cannot fix, is skipped and counted in the log.

        Raises:
            ValueError: see `read_file` and `convert_rows`.
        """
        if self.path:
            return convert_rows(read_file(self.path), self.path, convert)
        rows = read_hub(self.name, self.subset, self.split, self.cache_dir)
        return convert_rows(rows, f"{self.name} ({self.split})", convert, skip_bad=True)


def read_splits(
    convert: Callable[[Row], Example],
    data_path: str | None,
    eval_data_path: str | None,
    dataset_name: str | None,
    dataset_subset: str | None,
    train_split: str,
    eval_split: str,
) -> tuple[list[Example], list[Example]]:
    """Return the examples for training and for evaluation, of files, or of a data set of the hub without `data_path`.

    A file without another one for evaluation is used for both. Raises ValueError as `Source.examples`.
    """
    train = Source(data_path, dataset_name or "", dataset_subset, train_split).examples(convert)
    if data_path and not eval_data_path:
        return train, train
    return train, Source(eval_data_path, dataset_name or "", dataset_subset, eval_split).examples(convert)


def convert_rows(
    rows: Iterable[Row], source: str, convert: Callable[[Row], Example | None], skip_bad: bool = False
) -> list[Example]:
    """Convert all rows; those for which `convert` returns None are skipped.

    Args:
        rows: the rows.
        source: where they come from, for messages.
        convert: makes an example of a row; raises ValueError for a malformed one.
        skip_bad: leave malformed rows out and log their number.

    Raises:
        ValueError: a row is malformed (the message gives `source` and the row's number, from 1), or no row is left.
    """
    examples: list[Example] = []
    bad: list[str] = []
    for number, row in enumerate(rows, 1):
        try:
            example = convert(row)
        except ValueError as error:
            bad.append(f"{source}, row {number}: {error}")
            if not skip_bad:
                raise ValueError(bad[0]) from error
            continue
        if example is not None:
            examples.append(example)
    if not examples:
        raise ValueError(bad[0] if bad else f"{source}: the filters leave no row")
    if bad:
        logging.getLogger(__name__).warning("%d malformed rows are skipped, the first: %s", len(bad), bad[0])
    return examples


def text_of(row: Row, *columns: str) -> str:
    """Return the first of `columns` that the row has, as stripped text.

    Raises:
        ValueError: the row has none of them, or its value is neither text nor a finite number, or is empty.
    """
    for column in columns:
        value = row.get(column)
        if value is None:
            continue
        is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        if isinstance(value, bool) or not (is_number or (isinstance(value, str) and not _SURROGATE.search(value))):
            raise ValueError(f"{column!r} is not text but {_short(value)}")
        if not str(value).strip():
            raise ValueError(f"{column!r} is empty")
        return str(value).strip()
    if given := [column for column in columns if column in row]:
        raise ValueError(f"no {given[0]!r}: it is null")
    wanted = " or ".join(repr(column) for column in columns)
    raise ValueError(f"no {wanted}; it has {', '.join(map(repr, row)) or 'nothing'}")


def pick(examples: Sequence[Example], count: int, shuffle_seed: int | None = None) -> list[Example]:
    """Return the first `count` examples (all for -1), after a shuffle if a seed is given.

    Raises:
        ValueError: `count` is neither -1 nor positive.
    """
    if count != -1 and count < 1:
        raise ValueError(f"a number of examples is -1 (all) or at least 1, not {count}")
    picked = list(examples)
    if shuffle_seed is not None:
        # Seeded by text, which `random` hashes the same way everywhere.
        Random(f"rows {shuffle_seed}").shuffle(picked)
    return picked if count == -1 else picked[:count]


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}): {_short(text)}") from error


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
