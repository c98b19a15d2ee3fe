"""Finds the files of local training data, and reads their rows with their locations for error messages."""

import codecs
import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet
from loguru import logger

from prime_rl.configs.training.sft_data import SFTDataConfig, is_local
from prime_rl.core.errors import ConfigError, summarize_exception, translate_error
from prime_rl.rollouts.rendering.conversations import Conversation, RowError, read_row, without_none

LocatedRow = tuple[str, Mapping[str, Any]]
"""Location (`words.jsonl:17`) and columns."""
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_NUM_CHECKED = 1000
_SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")


def find_files(name: str, subset: str | None, split: str) -> list[Path]:
    """List the files of a file or folder `name` in order.

    `subset` is a file (without its suffix) or folder inside; None takes all. If the names in a folder contain splits
    (`train-00001.parquet`), those of `split` are selected. Raises ConfigError if there is none.
    """
    root = Path(name).expanduser()
    if not root.exists():
        raise ConfigError(f"data.name: {name} does not exist")
    if root.is_file():
        if root.suffix not in SUFFIXES:
            raise ConfigError(f"data.name: {name} has none of the suffixes {', '.join(SUFFIXES)}")
        if subset is not None:
            raise ConfigError(f"data.subsets: {name} is a file, which has no subsets; set data.name to its folder")
        if split != "train":
            logger.warning(f"data.split = {split!r} has no effect: {name} is a file and is read completely")
        return [root]
    found = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    if subset is not None:
        names = {path: path.relative_to(root).with_suffix("").as_posix() for path in found}
        inside = [path for path in found if subset in (names[path], names[path].split("/")[0])]
        if not inside:
            raise ConfigError(f"data.subsets: {name} contains no {subset}; it has {_shown(iter(names.values()))}")
        found = inside
    if not found:
        raise ConfigError(f"data.name: {name} contains no file with a suffix of {', '.join(SUFFIXES)}")
    return _of_split(found, name, split)


def is_saved(name: str) -> bool:
    """Whether `name` is a folder that the `datasets` library wrote with `save_to_disk`."""
    folder = Path(name).expanduser()
    return any((folder / file).is_file() for file in ("state.json", "dataset_dict.json"))


def load_saved(name: str, split: str) -> Any:
    """Load the data set of such a folder. Raises ConfigError if it is damaged, or has no such split."""
    import datasets

    def make(error: Exception) -> ConfigError:
        return ConfigError(
            f"data.name: {name} was written by save_to_disk, and cannot be read: {summarize_exception(error)}"
        )

    with translate_error((OSError, ValueError, KeyError), make):
        loaded = datasets.load_from_disk(str(Path(name).expanduser()))
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise ConfigError(f"data.split: {name} has no split {split}; it has {', '.join(loaded)}")
    return loaded[split]


def read_local(name: str, subset: str | None, split: str) -> Iterator[LocatedRow]:
    """Yield the rows of a file or folder. Raises ConfigError as `find_files`, `load_saved` and `read_rows`."""
    if is_saved(name):
        yield from (
            (f"row {i} of {name}", columns_without_none(row)) for i, row in enumerate(load_saved(name, split), 1)
        )
        return
    for file in find_files(name, subset, split):
        yield from read_rows(file)


def check_files(config: SFTDataConfig) -> None:
    """Read the first rows of local data sets, before torch is imported, which takes seconds.

    Raises:
        ConfigError: one is missing or empty, a row is invalid, or none has a message of a role that is trained on.
    """
    for name, subset, split in config.sets if all(map(is_local, config.name)) else ():
        rows = list(islice(read_local(name, subset, split), _NUM_CHECKED))
        if not rows:
            raise ConfigError(f"data.name: {name} is empty")
        roles = set[str]()
        for row in rows:
            example = locate_errors(row, lambda columns: read_row(columns, config))
            if not isinstance(example, Conversation):
                roles |= {"user", "assistant"}
                continue
            learned = (i for i in range(example.first, len(example.messages)) if i not in example.excluded)
            roles |= {example.messages[i]["role"] for i in learned}
        trained = [role for role, is_trained in config.loss_mask if is_trained]
        if len(rows) < _NUM_CHECKED and not roles & {*trained}:
            raise ConfigError(
                f"data.name: {name} has no message to train on: its roles are {', '.join(sorted(roles)) or 'none'}, "
                f"and data.loss_mask selects {', '.join(trained)}"
            )


def columns_without_none(row: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the keys of nested objects that a table filled with None; columns of None stay."""
    return {column: without_none(value) for column, value in row.items()}


def locate_errors(row: LocatedRow, use: Callable[[Any], Any]) -> Any:
    """Return `use(columns)` of a row; raise ConfigError with its location for a RowError."""
    where, columns = row
    with translate_error(RowError, lambda error: ConfigError(f"data.name: {where}: {error}")):
        return use(columns)


def read_rows(path: Path) -> Iterator[LocatedRow]:
    """Yield the rows of a file. Raises ConfigError with the line if they cannot be read or do not match the suffix."""
    with _name_location(lambda: str(path), path.suffix[1:]):
        yield from {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}[path.suffix](path)


def _jsonl(path: Path) -> Iterator[LocatedRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, _object(where, _parse_json(where, line))


def _json(path: Path) -> Iterator[LocatedRow]:
    """Read an array of objects, or JSON lines, which many files with this suffix contain."""
    with path.open("rb") as file:
        if file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip()[:1] != b"[":
            yield from _jsonl(path)
            return
    for number, row in enumerate(_parse_json(str(path), path.read_bytes()), 1):
        yield f"{path}, entry {number}", _object(f"entry {number} of {path}", row)


def _csv(path: Path) -> Iterator[LocatedRow]:
    csv.field_size_limit(sys.maxsize)  # the default limit of a cell is 128 KiB
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)  # reject unclosed quotes
        with _name_location(lambda: f"{path}:{reader.line_num + 1}", "CSV"):
            _check_names(path, reader.fieldnames or ())
            for row in reader:
                if None in row or None in row.values():
                    raise ConfigError(f"data.name: {path}:{reader.line_num} does not have one cell per column")
                yield f"{path}:{reader.line_num}", row


def _parquet(path: Path) -> Iterator[LocatedRow]:
    with pyarrow.parquet.ParquetFile(path) as file:
        _check_names(path, file.schema_arrow.names)
        rows = (row for batch in file.iter_batches(batch_size=1024) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield f"{path}, row {number}", columns_without_none(row)


def _check_names(path: Path, columns: Sequence[str]) -> None:
    if twice := [name for name, count in Counter(columns).items() if count > 1]:
        raise ConfigError(f"data.name: {path} has {twice[0]!r} as the name of several columns")


def _parse_json(where: str, text: bytes) -> Any:
    with _name_location(lambda: where, "JSON"):
        return json.loads(text)


def _name_location(where: Callable[[], str], kind: str) -> AbstractContextManager[None]:
    """Report that `where` is not of this kind, or cannot be read."""

    def make(error: Exception) -> ConfigError:
        said = getattr(error, "strerror", None) or str(error).splitlines()[0]
        problem = "cannot be read" if isinstance(error, OSError) else f"is not {kind}"
        return ConfigError(f"data.name: {where()} {problem}: {said}")

    return translate_error((OSError, ValueError, csv.Error, RecursionError), make)


def _object(where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(f"data.name: {where} is not a JSON object")
    return row


def _of_split(files: list[Path], name: str, split: str) -> list[Path]:
    """Select the files whose names contain `split`; all files if no name contains a split and `split` is train."""
    words = {path: re.split(r"[^a-z]+", path.stem.lower()) for path in files}
    splits = {path: next((_SPLITS[word] for word in words[path] if word in _SPLITS), None) for path in files}
    wanted = _SPLITS.get(split, split)
    if not any(splits.values()) and wanted == "train":
        return files
    chosen = [path for path in files if splits[path] == wanted]
    if not chosen:
        raise ConfigError(f"data.split: no file of {name} is named {split}; it has {_shown(p.name for p in files)}")
    return chosen


def _shown(names: Iterator[str]) -> str:
    first = list(islice(names, 6))
    return ", ".join(first[:5]) + (", ..." if len(first) > 5 else "")
