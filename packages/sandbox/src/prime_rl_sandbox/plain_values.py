"""Plain Python values as JSON: how arguments and results cross the wall of a sandbox, without pickle.

The source of this module also runs inside of the sandbox (`session.py`), so it needs the standard library alone.
"""

from collections import Counter
from typing import Any

_MAX_EQUAL_HASHES = 100
_MAX_DECIMAL_BITS = 10_000  # Python refuses to write or read more than 4300 decimal digits


def encode_value(value: Any) -> Any:
    """Return a JSON value that `decode_value` turns back into an equal plain value.

    Raises:
        TypeError: the value contains something other than numbers, text, bytes and containers of these.
    """
    kind = type(value)
    if kind is int and value.bit_length() > _MAX_DECIMAL_BITS:
        return {"type": "int", "items": [hex(value)]}
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encode_value(item) for item in value]
    if kind in (tuple, set, frozenset):
        return {"type": kind.__name__, "items": [encode_value(item) for item in value]}
    if isinstance(value, dict):
        return {"type": "dict", "items": [[encode_value(key), encode_value(item)] for key, item in value.items()]}
    if kind is complex:
        return {"type": "complex", "items": [value.real, value.imag]}
    if kind in (bytes, bytearray):
        return {"type": kind.__name__, "items": list(value)}
    bases: tuple[Any, ...] = (int, float, str, list, tuple, set)
    for base in bases:  # of a subclass, such as IntEnum or a named tuple
        if isinstance(value, base):
            return encode_value(base(value))
    raise TypeError(f"a value of type {kind.__name__} cannot leave the sandbox")


def decode_value(value: Any) -> Any:
    """Return the plain value of a JSON value.

    Raises:
        ValueError: it was not made by `encode_value`, or would take too long.
        TypeError: the same.
        OverflowError: the same.
    """
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    makers = {"tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes, "bytearray": bytearray}
    kind, items = value.get("type"), value.get("items")
    if not isinstance(items, list):
        raise ValueError("not an encoded value")
    if kind == "dict":
        pairs = [(decode_value(key), decode_value(item)) for key, item in items]
        _check_hashes([key for key, _ in pairs])
        return dict(pairs)
    if kind == "complex":
        return complex(*items)
    if kind == "int":
        [digits] = items
        return int(digits, 16)
    if kind not in makers:
        raise ValueError("not an encoded value")
    decoded = [decode_value(item) for item in items]
    if kind in ("set", "frozenset"):
        _check_hashes(decoded)
    return makers[kind](decoded)


def _check_hashes(keys: list[Any]) -> None:
    """Raise ValueError for many keys with the same hash: hostile ones, of which a table takes quadratic time."""
    if max(Counter(map(hash, keys)).values(), default=0) > _MAX_EQUAL_HASHES:
        raise ValueError("too many keys with the same hash")
