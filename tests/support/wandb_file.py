"""Reads the file of an offline W&B run, which has the format of LevelDB's logs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_HEADER, _BLOCK, _RECORD_HEADER = 7, 32768, 7
_FULL, _LAST = 1, 4


def history(file: Path) -> Iterator[dict[str, Any]]:
    """Yield what each call of `run.log` logged; nested values have names such as `samples/_type`."""
    for record in _records(file):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def _records(file: Path) -> Iterator[Any]:
    data, at, part = file.read_bytes(), _HEADER, b""
    while at + _RECORD_HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _RECORD_HEADER:  # padding
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + _RECORD_HEADER : at + _RECORD_HEADER + size]
        at += _RECORD_HEADER + size
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(part)
            yield record
            part = b""
