"""Finished groups on disk until they are shipped, so that a restart does not sample them again.

The ledger records a file once it is complete (I4), with its hash. Groups are msgpack with their arrays as raw bytes.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
from xxhash import xxh3_128_hexdigest

from prime_rl.core.types import Group

FORMAT = "prime_rl.spool/1"


class PendingGroupError(ValueError):
    """The file of a group is missing or damaged; the message names it."""


class _Spooled(msgspec.Struct, frozen=True):
    format: str
    group: Group


def encode_group(group: Group) -> bytes:
    """Return `group` as bytes."""
    try:
        return _ENCODER.encode(_Spooled(FORMAT, group))
    except UnicodeEncodeError:  # a lone surrogate, which JSON in a completion can contain
        rollouts = []
        for rollout in group.rollouts:
            text = tuple((role, content.encode("utf-8", "replace").decode()) for role, content in rollout.text)
            rollouts.append(replace(rollout, text=text))
        return _ENCODER.encode(_Spooled(FORMAT, replace(group, rollouts=tuple(rollouts))))


def decode_group(data: bytes, path: Path) -> Group:
    """Invert `encode_group`; the arrays are read-only views of `data`, which comes from `path`."""
    try:
        spooled = _DECODER.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise PendingGroupError(f"{path} is not a group: {error}") from None
    if spooled.format != FORMAT:
        raise PendingGroupError(f"{path} has format {spooled.format!r}, expected {FORMAT!r}")
    return spooled.group


def write_groups(files: Iterable[tuple[Path, bytes]]) -> None:
    """Write files without waiting for the disk: the hash reveals one that a crash damages. Raises OSError."""
    for path, data in files:
        path.write_bytes(data)


def read_group(path: Path, expected_hash: str) -> Group:
    """Read a pending group; raises PendingGroupError if the file is missing or damaged."""
    if not path.exists():
        raise PendingGroupError(f"{path} is missing")
    data = path.read_bytes()
    if (found := xxh3_128_hexdigest(data)) != expected_hash:
        raise PendingGroupError(f"{path} has hash {found}, expected {expected_hash}")
    return decode_group(data, path)


def clean_spool(directory: Path, keep: Iterable[Path]) -> None:
    """Delete the files of groups that have ended and of interrupted writes: all except `keep`."""
    kept = set(keep)
    if directory.is_dir():
        for path in directory.iterdir():
            if path not in kept and path.name.removeprefix(".tmp-").startswith("group_"):  # .tmp-: of version 0.1.0
                path.unlink()


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, np.ascontiguousarray(value).data if value.size else b""]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a group cannot hold a {type(value).__name__}")


def _decode(expected: type, value: Any) -> Any:
    dtype, shape, data = value
    if dtype != (wanted := _dtype_of(expected)):
        raise ValueError(f"an array is {dtype}, expected {wanted}")
    return np.frombuffer(data, dtype).reshape(shape)


@cache  # a restart decodes millions of arrays
def _dtype_of(annotation: type) -> str:
    (wanted,) = get_args(get_args(annotation)[1])
    return np.dtype(wanted).str


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode)
_DECODER = msgspec.msgpack.Decoder(_Spooled, dec_hook=_decode)
