"""Finished groups on disk until they are shipped, so that a restart samples none of them again.

I4: a file holds a whole group or is not there; its hash, kept in the ledger, proves which one. Groups are msgpack
with the raw bytes of their arrays: no pickle, no Python object per token.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import xxhash

from prime_rl.run.artifact import fsync
from prime_rl.types import Group

FORMAT = "prime_rl.spool/1"
Text = tuple[tuple[str, str], ...]


class SpoolError(Exception):
    """A spool file that is missing, torn or not what the ledger says; the message names the file."""


class _Spooled(msgspec.Struct, frozen=True):
    format: str
    group: Group


def encode_group(group: Group) -> bytes:
    """Return `group` in full as bytes."""
    try:
        return _ENCODER.encode(_Spooled(FORMAT, group))
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON in a completion may spell
        rollouts = [replace(rollout, text=_writable(rollout.text)) for rollout in group.rollouts]
        return _ENCODER.encode(_Spooled(FORMAT, replace(group, rollouts=tuple(rollouts))))


def decode_group(data: bytes) -> Group:
    """Read `encode_group` back; the arrays are read-only views of `data`.

    Raises:
        ValueError: the bytes are not a group.
    """
    try:
        spooled = _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    if spooled.format != FORMAT:
        raise ValueError(f"format {spooled.format!r}, expected {FORMAT!r}")
    return spooled.group


def write_groups(files: Iterable[tuple[Path, bytes]]) -> None:
    """Write files of one directory so that they survive a crash: after this each is there as a whole.

    Raises:
        OSError: the disk is full, the directory not writable ...
    """
    directory = None
    for path, data in files:
        temporary = path.with_name(f".tmp-{path.name}")
        with temporary.open("wb") as file:
            file.write(data)
        fsync(temporary)
        temporary.rename(path)
        directory = path.parent
    if directory is not None:
        fsync(directory)


def read_group(path: Path, expected_hash: str) -> Group:
    """Read a spooled group.

    Raises:
        SpoolError: the file is missing, its hash is not `expected_hash`, or it does not hold a group.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise SpoolError(f"{path} is missing") from None
    if (found := content_hash(data)) != expected_hash:
        raise SpoolError(f"{path} has hash {found}, the ledger says {expected_hash}")
    try:
        return decode_group(data)
    except ValueError as error:
        raise SpoolError(f"{path} is not a group: {error}") from None


def content_hash(data: bytes) -> str:
    """Return the hex xxh3_128 of `data`."""
    return xxhash.xxh3_128_hexdigest(data)


def clean_spool(directory: Path, keep: Iterable[Path]) -> None:
    """Delete every spool file but `keep`: of groups that have ended, and of writes that a crash cut short."""
    kept = set(keep)
    if directory.is_dir():
        for path in directory.iterdir():
            if path not in kept and path.name.removeprefix(".tmp-").startswith("group_"):
                path.unlink()


def _writable(text: Text) -> Text:
    return tuple((role, content.encode("utf-8", "replace").decode()) for role, content in text)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, np.ascontiguousarray(value).data if value.size else b""]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a group cannot hold a {type(value).__name__}")


def _decode(expected: type, value: Any) -> Any:
    dtype, shape, data = value
    (wanted,) = get_args(get_args(expected)[1])
    if np.dtype(dtype) != wanted:
        raise ValueError(f"an array is {dtype}, expected {np.dtype(wanted).str}")
    return np.frombuffer(data, dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode)
_DECODER = msgspec.msgpack.Decoder(_Spooled, dec_hook=_decode)
