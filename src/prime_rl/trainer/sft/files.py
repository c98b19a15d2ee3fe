"""Rows of local files, read one by one, each with the place it stands at, so that a bad one can be found."""

import codecs
import csv
import json
import re
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from loguru import logger

from prime_rl.errors import ConfigError

Row = tuple[str, Mapping[str, Any]]
"""Where it stands (`words.jsonl:17`), and its columns."""

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_SPLITS = {"train": "train", "test": "test", "validation": "validation", "valid": "validation", "val": "validation"}
_SPLITS |= {"dev": "validation"}


def find_files(name: str, subset: str | None, split: str) -> list[Path]:
    """List the files of a local data set in order.

    Args:
        name: a file, or a folder.
        subset: a file (without its ending) or folder inside; None takes all.
        split: where the names of files in a folder tell splits apart (`train-00001.parquet`), only those of this one.

    Raises:
        ConfigError: there are none.
    """
    root = Path(name).expanduser()
    if not root.exists():
        raise ConfigError(f"data.name: {name} does not exist")
    if root.is_file():
        if root.suffix not in SUFFIXES:
            raise ConfigError(f"data.name: {name} is none of {', '.join(SUFFIXES)}")
        if subset is not None:
            raise ConfigError(f"data.subsets: {name} is a file, which has no subsets; give its folder as data.name")
        if split != "train":
            logger.warning(f"data.split = {split!r} has no effect: {name} is a file, all of which is read")
        return [root]
    found = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    if subset is not None:
        names = {path: path.relative_to(root).with_suffix("").as_posix() for path in found}
        inside = [path for path in found if subset in (names[path], names[path].split("/")[0])]
        if not inside:
            raise ConfigError(f"data.subsets: {name} holds no {subset}; it has {_shown(iter(names.values()))}")
        found = inside
    if not found:
        raise ConfigError(f"data.name: {name} holds no file that ends in {', '.join(SUFFIXES)}")
    return _of_split(found, name, split)


def read_rows(path: Path, start: int = 0) -> Iterator[Row]:
    """Yield the rows of a file from row `start` on; what comes before is passed over without being decoded.

    Raises:
        ConfigError: the file cannot be read, or a row is not what the ending says; names file and line.
    """
    reader = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}[path.suffix]
    try:
        yield from reader(path, start)
    except OSError as error:
        raise ConfigError(f"data.name: cannot read {path}: {error.strerror or error}") from None


def _jsonl(path: Path, start: int) -> Iterator[Row]:
    with path.open("rb") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        for number, line in islice(lines, start, None):
            yield _object(f"{path}:{number}", line)


def _json(path: Path, start: int) -> Iterator[Row]:
    """One array of objects, or lines after all, as many files with this ending are."""
    with path.open("rb") as file:
        if file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip()[:1] != b"[":
            yield from _jsonl(path, start)
            return
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"data.name: {path} is not JSON: {error}") from None
    for number, row in enumerate(rows[start:], start + 1):
        if not isinstance(row, dict):
            raise ConfigError(f"data.name: entry {number} of {path} is not a JSON object")
        yield f"{path}, entry {number}", row


def _csv(path: Path, start: int) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # a text may be longer than the 128 KiB that are allowed otherwise
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)  # otherwise a quote that is never closed swallows the rest
        try:
            for row in islice(reader, start, None):
                if None in row or None in row.values():
                    raise ConfigError(f"data.name: {path}:{reader.line_num} has not one cell per column")
                yield f"{path}:{reader.line_num}", row
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"data.name: {path}:{reader.line_num + 1} is not CSV: {error}") from None


def _parquet(path: Path, start: int) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            row = 0
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                if row + size > start:
                    for batch in file.iter_batches(batch_size=1024, row_groups=[group]):
                        for example in batch.to_pylist():
                            if row >= start:
                                yield f"{path}, row {row + 1}", example
                            row += 1
                else:
                    row += size
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"data.name: {path} is not a parquet file: {str(error).splitlines()[0]}") from None


def _object(where: str, line: bytes) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"data.name: {where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"data.name: {where} is not a JSON object")
    return where, row


def _of_split(files: list[Path], name: str, split: str) -> list[Path]:
    """Keep the files whose names say `split`; all, where no name says any and the training split is asked for."""
    said = {path: _split_of(path) for path in files}
    wanted = _SPLITS.get(split, split)
    if not any(said.values()) and wanted == "train":
        return files
    chosen = [path for path in files if said[path] == wanted]
    if not chosen:
        raise ConfigError(f"data.split: no file of {name} is called {split}; it has {_shown(p.name for p in files)}")
    return chosen


def _split_of(path: Path) -> str | None:
    words = re.split(r"[^a-z]+", path.stem.lower())
    return next((_SPLITS[word] for word in words if word in _SPLITS), None)


def _shown(names: Iterator[str]) -> str:
    first = list(islice(names, 6))
    return ", ".join(first[:5]) + (", ..." if len(first) > 5 else "")
