"""Comparison of outputs with expected values, outside of the sandbox, and plain values as JSON."""

import math
from collections.abc import Callable, Mapping
from typing import Any

_RELATIVE_TOLERANCE = 1e-6
_ABSOLUTE_TOLERANCE = 1e-9


def is_equal(output: Any, expected: Any, compare: str | Callable[[Any, Any], bool] = "exact") -> bool:
    """Return whether an output is the expected one.

    Text is compared without white space at the ends of lines and without empty lines at the end. "tolerance" compares
    numbers, also inside text and containers, with a relative tolerance of 1e-6.

    Raises:
        ValueError: `compare` is unknown.
    """
    if callable(compare):
        return bool(compare(output, expected))
    if compare not in ("exact", "tolerance"):
        raise ValueError(f"compare = {compare!r} is unknown; use exact, tolerance or a function")
    if isinstance(output, str) and isinstance(expected, str):
        if normalize_text(output) == normalize_text(expected):
            return True
        return compare == "tolerance" and _is_close_text(output, expected)
    return is_close(output, expected) if compare == "tolerance" else same_value(output, expected)


def normalize_text(text: str) -> str:
    """Return the text without white space at the ends of lines and without empty lines at the end."""
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


def same_value(output: Any, expected: Any) -> bool:
    """Return whether two plain values are equal, with tuples and lists alike but True apart from 1."""
    if isinstance(output, bool) != isinstance(expected, bool):
        return False
    if isinstance(output, list | tuple) and isinstance(expected, list | tuple):
        return len(output) == len(expected) and all(map(same_value, output, expected))
    return bool(output == expected)


def is_close(output: Any, expected: Any) -> bool:
    """Return whether two plain values are equal up to rounding."""
    if isinstance(output, bool) or isinstance(expected, bool):
        return output is expected
    if isinstance(output, int | float) and isinstance(expected, int | float):
        if math.isnan(expected):
            return math.isnan(output)
        try:
            return math.isclose(output, expected, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
        except OverflowError:
            return output == expected
    if isinstance(output, list | tuple) and isinstance(expected, list | tuple):
        return len(output) == len(expected) and all(map(is_close, output, expected))
    if isinstance(output, Mapping) and isinstance(expected, Mapping):
        return output.keys() == expected.keys() and all(is_close(output[key], expected[key]) for key in expected)
    return bool(output == expected)


def _is_close_text(output: str, expected: str) -> bool:
    words, expected_words = output.split(), expected.split()
    return len(words) == len(expected_words) and all(map(_is_close_word, words, expected_words))


def _is_close_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if "_" in word or not word.isascii():  # float() takes 1_000 and digits of all scripts
        return False
    try:
        return is_close(float(word), float(expected))
    except ValueError:
        return False
