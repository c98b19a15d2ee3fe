"""Reads the first rows of a file as users have them: several encodings, delimiters and JSON layouts, some bad rows."""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.storage.model_files import ask_hub

Row = dict[str, Any]

_TABLES = (".csv", ".tsv", ".txt")
_JSON = (".jsonl", ".ndjson", ".json")
_FORMATS = "csv, tsv, jsonl, json or parquet (text also with .gz)"
_SAMPLE_BYTES = 1 << 16
_WRAPPERS = {"data", "rows", "train", "examples", "items", "records", "samples", "instances", "questions"}
_NAMES = {
    "question",
    "questions",
    "prompt",
    "problem",
    "instruction",
    "text",
    "answer",
    "answers",
    "label",
    "solution",
    "id",
}
"""Names in a first line that is a header in any case."""
_MAX_VALUE_CHARS = 1 << 26
"""Longest JSON value or CSV cell: more in one row is a malformed file, of which only this much is read."""
_BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}

_RARE = ["mac_cyrillic", "mac_greek", "mac_iceland", "mac_latin2", "mac_roman", "mac_turkish"]
_WESTERN = "äöüßáéíóúàèìòùâêîôûëïçñãõåæøœ¿¡«»°§€£“”‘’„–—…\xa0"  # noqa: RUF001
"""What is not ASCII in most texts of Western languages."""


@dataclass
class Table:
    """The first rows of a source.

    Attributes:
        rows: those that could be read.
        notes: what is unusual about the source.
        bad: why other rows could not be read, and their places.
        has_more: whether the source has further rows.
    """

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)
    has_more: bool = False


def read_file(path: Path, limit: int, encoding: str | None) -> Table:
    """Read at most `limit` rows of a file. Raises ConfigError if it has none or is of another kind."""
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    try:
        with _open(path) as file:
            sample = file.read(_SAMPLE_BYTES)
        if not sample.strip():
            raise ConfigError(f"--data: {path} is empty")
        if sample.startswith(b"PAR1"):
            return _take(_parquet_rows(path), Table(), limit)
        if suffix in (".parquet", ".pq") or suffix not in _TABLES + _JSON or sample.startswith(b"PK\x03\x04"):
            raise ConfigError(f"--data: {path} is not readable as a table; save it as {_FORMATS}")
        chosen, errors = encoding or _encoding(sample, path), "strict"
        try:
            table = _read_text(path, suffix, chosen, errors, limit)
        except UnicodeDecodeError:
            if encoding:
                raise
            chosen, errors = _legacy_encoding(sample)
            table = _read_text(path, suffix, chosen, errors, limit)
    except (OSError, EOFError, zlib.error, UnicodeError, LookupError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or summarize_exception(error)
        raise ConfigError(f"--data: {path} cannot be read: {reason}; correct the file, or set --encoding") from None
    if errors == "replace":
        table.notes.insert(0, "some bytes are not UTF-8 and were replaced")
    elif not chosen.startswith("utf-8"):
        table.notes.insert(0, f"it is not UTF-8 and was read as {chosen}; --encoding changes that")
    if not table.rows:
        why = "".join(f": {place} is {reason}" for reason, place in table.bad[:1])
        raise ConfigError(f"--data: {path} has no rows{why}")
    return table


def read_data_set(name: str, limit: int) -> Table:
    """Read at most `limit` rows of a folder of files, or of a data set of the hub: NAME or NAME:SUBSET.

    Raises:
        ConfigError: it does not exist or cannot be read.
    """
    hub_name, _, subset = name.partition(":")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub_name) or Path(name).suffix in (*_TABLES, *_JSON, ".parquet"):
            raise ConfigError(f"--data: there is no file {name}, and it is no name of a data set of the hub")
        _check_on_hub(hub_name)
    elif any((folder / file).is_file() for file in ("config.json", "tokenizer_config.json", "adapter_config.json")):
        raise ConfigError(f"--data: {name} is a folder with a model; pass the data, and set model.name in the project")
    from datasets import exceptions, get_dataset_config_names, load_dataset
    from datasets.table import CastError

    where, notes = str(folder) if folder.is_dir() else hub_name, []
    kinds = {file.suffix for file in folder.glob("*")} & {*_TABLES, *_JSON, ".parquet"}
    if len(kinds) > 1:  # the library would read those of one format
        formats = ", ".join(sorted(kinds))
        raise ConfigError(f"--data: {name} has files of several formats ({formats}); pass one of the files")
    try:
        subsets = get_dataset_config_names(where)
        if not subset:
            subset = next((each for each in ("default", "main", "all") if each in subsets), subsets[0])
            if len(subsets) > 1:
                notes.append(f"subset {subset} of {', '.join(subsets[:8])}; {name}:SUBSET takes another")
        splits = load_dataset(where, subset, streaming=True)
        split = "train" if "train" in splits else next(iter(splits))
        notes.append(f"split {split} of {', '.join(splits)}")
        table = _take(map(dict, splits[split]), Table(notes=notes), limit)
    except CastError:
        raise ConfigError(f"--data: the files of {name} have different columns; pass one of them") from None
    except (OSError, ValueError, RuntimeError, ImportError, exceptions.DatasetsError) as error:
        raise ConfigError(f"--data: {name} cannot be read: {summarize_exception(error)}; pass a file of it") from None
    if not table.rows:
        raise ConfigError(f"--data: {name} has no rows")
    return table


def _check_on_hub(name: str) -> None:
    from huggingface_hub import constants

    advice = "download it on another machine and pass its file, as --data train.parquet, or set HF_ENDPOINT to a mirror"
    try:
        status = ask_hub(f"api/datasets/{name}").status_code
    except ConnectionError as error:
        raise ConfigError(
            f"--data: there is no file {name}, and the hub ({constants.ENDPOINT}) cannot be reached: {error}; {advice}"
        ) from None
    if status >= 400:
        raise ConfigError(
            f"--data: there is no file {name}, and no data set of the hub that you can read (HTTP {status}); check the "
            "name, or set HF_TOKEN"
        )


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    with gzip.open(path) if is_gzip else path.open("rb") as opened:
        yield cast(BinaryIO, opened)


def _encoding(sample: bytes, path: Path) -> str:
    if (bom := next((bom for bom in _BOMS if sample.startswith(bom)), None)) is not None:
        return _BOMS[bom]
    if (zeros := sample.count(0)) == 0:
        return "utf-8"
    if zeros < len(sample) // 4:
        raise ConfigError(f"--data: {path} is binary; save it as {_FORMATS}")
    return "utf-16-le" if sample[1::2].count(0) > sample[::2].count(0) else "utf-16-be"


def _legacy_encoding(sample: bytes) -> tuple[str, str]:
    """Return the encoding of a file that is not UTF-8, and what to do with bytes that it does not have."""
    from charset_normalizer import from_bytes

    text = sample.decode("utf-8", "replace")
    if sum(not char.isascii() for char in text) > 2 * text.count("\ufffd"):
        return "utf-8", "replace"  # UTF-8 apart from a few bytes
    others = b"\n".join(line for line in sample.splitlines() if not line.isascii())
    western = set(others.decode("cp1252", "replace").lower())
    if (
        all(char.isascii() or char in _WESTERN for char in western)
        or (best := from_bytes(others, cp_exclusion=_RARE).best()) is None
    ):
        return "cp1252", "strict"
    return best.encoding, "strict"


def _read_text(path: Path, suffix: str, encoding: str, errors: str, limit: int) -> Table:
    table = Table()
    with _open(path) as binary, io.TextIOWrapper(binary, encoding, errors, newline="") as text:
        rows = _csv_rows(text, table, path, suffix) if suffix in _TABLES else _json_rows(text, table, path)
        return _take(rows, table, limit)


def _take(rows: Iterator[Row], table: Table, limit: int) -> Table:
    table.rows = list(islice(rows, limit))
    table.has_more = len(table.rows) == limit and next(rows, None) is not None
    return table


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"--data: {path} is a damaged Parquet file: {summarize_exception(error)}") from None


def _csv_rows(text: TextIO, table: Table, path: Path, suffix: str) -> Iterator[Row]:
    csv.field_size_limit(_MAX_VALUE_CHARS)
    sample = text.read(_SAMPLE_BYTES)
    if sample[:4].lower() == "sep=":  # written by Excel
        sample = sample.partition("\n")[2]
    delimiter = "\t" if suffix == ".tsv" else _delimiter(sample)
    if delimiter != ",":
        table.notes.append(f"the delimiter is {delimiter!r}")
    reader = csv.reader(_lines(sample, text), delimiter=delimiter, skipinitialspace=True, strict=True)
    start = 1
    lines: Iterator[list[str]] = (line for line in reader if any(cell.strip() for cell in line))
    try:
        header = next(lines, [])
        if any(map(_is_value, header)) and not any(cell.strip().lower() in _NAMES for cell in header):
            table.notes.append("it has no header: the columns are called column_1, column_2 ...")
            lines, header = chain((header,), lines), [f"column_{number}" for number in range(1, len(header) + 1)]
        columns, start = _unique(header, table), reader.line_num + 1
        for line in lines:
            if not any(line[len(columns) :]):
                line = line[: len(columns)]
            if len(line) == len(columns):
                yield dict(zip(columns, line, strict=True))
            else:
                table.bad.append((f"not {len(columns)} values", f"line {reader.line_num}"))
            start = reader.line_num + 1
    except csv.Error as error:
        raise ConfigError(
            f"--data: {path}, line {start}: a quotation mark is not closed or not doubled ({error}); correct it"
        ) from None


def _lines(sample: str, text: TextIO) -> Iterator[str]:
    """Yield the lines of a text whose beginning has been read."""
    for line in io.StringIO(sample, newline=""):
        yield line if line.endswith(("\n", "\r")) else line + text.readline(_MAX_VALUE_CHARS)
    while line := text.readline(_MAX_VALUE_CHARS):
        yield line


def _delimiter(sample: str) -> str:
    """Return the delimiter that gives most of the first rows the same number of columns, the largest one."""

    def score(delimiter: str) -> tuple[bool, int]:
        lines = [line for line in csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter) if line][:50] or [[]]
        lines = lines[:-1] if len(lines) > 2 else lines  # the last one may be cut
        columns = len(lines[0])
        fitting = sum(len(line) == columns for line in lines)
        return columns > 1 and 2 * fitting > len(lines), columns

    return max(",;\t|", key=score)


def _is_value(cell: str) -> bool:
    """Whether a cell of the first line cannot be the name of a column."""
    cell = cell.strip()
    is_question = cell.endswith("?") and len(cell.split()) >= 3
    return is_question or len(cell) > 80 or cell.replace(".", "", 1).lstrip("-").isdigit()


def _unique(header: list[str], table: Table) -> list[str]:
    columns: list[str] = []
    for number, name in enumerate(header, 1):
        name = name.strip() or f"column_{number}"
        if name in columns:
            table.notes.append(f"two columns are called {name}: the second is {name}_{number} here")
            name = f"{name}_{number}"
        columns.append(name)
    return columns


def _json_rows(text: TextIO, table: Table, path: Path) -> Iterator[Row]:
    """Yield the objects of JSON lines, of a list, or of a list or columns inside one object."""
    sample = text.read(_SAMPLE_BYTES).lstrip()
    if sample.startswith("{"):
        if "\n" not in sample:
            sample += text.readline(_MAX_VALUE_CHARS)
        first, _, others = sample.partition("\n")
        if (row := _parse(first)) is not None:
            lines = filter(str.strip, _lines(others, text))
            if (second := next(lines, None)) is None:
                yield from _unfold(row)
                return
            for number, line in enumerate(chain((first, second), lines), 1):
                if isinstance(row := _parse(line), dict):
                    yield row
                else:
                    table.bad.append(("not a JSON object", f"line {number}"))
            return
    values = _json_values(sample.removeprefix("["), text, path)
    if sample.startswith("{"):
        one, second = next(values), next(values, None)
        if second is None:
            yield from _unfold(one)
            return
        values = chain((one, second), values)
    for number, value in enumerate(values, 1):
        if isinstance(value, dict):
            yield value
        else:
            table.bad.append(("not a JSON object", f"entry {number}"))


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _json_values(start: str, text: TextIO, path: Path) -> Iterator[Any]:
    """Yield the values of a list, or of a sequence of values, and read no more than is needed."""
    decoder, buffer = json.JSONDecoder(), start
    while True:
        buffer = buffer.lstrip(" \t\r\n,")
        if buffer.startswith("]"):
            return
        try:
            value, end = decoder.raw_decode(buffer)
        except (ValueError, RecursionError) as error:
            more = text.read(max(_SAMPLE_BYTES, len(buffer)))
            if not more and not buffer:
                return
            if not more or len(buffer) > _MAX_VALUE_CHARS:
                raise ConfigError(f"--data: {path} is not JSON: {error}, near {buffer[:60]!r}") from None
            buffer += more
        else:
            buffer = buffer[end:]
            yield value


def _unfold(value: Any) -> Iterator[Row]:
    """Yield the rows in one object: a list of objects, its columns, or else the object itself."""
    tables = [value[key] for key in value if len(value) == 1 or key.lower() in _WRAPPERS]
    tables = [each for each in tables if isinstance(each, list) and each and isinstance(each[0], dict)]
    tables = [each for each in tables if not {"role", "from"} & each[0].keys()]  # a conversation
    columns = [each for each in value.values() if isinstance(each, list)]
    inner = [each for each in value.values() if isinstance(each, Mapping)]
    if tables:
        yield from (row for row in max(tables, key=len) if isinstance(row, dict))
    elif len(columns) > 1 and len(columns) == len(value) and len({len(each) for each in columns}) == 1:
        yield from (dict(zip(value, cells, strict=True)) for cells in zip(*columns, strict=True))
    elif len(inner) > 1 and len(inner) == len(value):
        if all(key.isdecimal() for key in inner[0]):  # columns by row number, as pandas writes them
            yield from ({name: cells.get(key) for name, cells in value.items()} for key in inner[0])
        else:
            yield from map(dict, inner)
    else:
        yield value
