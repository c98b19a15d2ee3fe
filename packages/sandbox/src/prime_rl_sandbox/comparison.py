"""Comparison of outputs with expected values, outside of the sandbox."""

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, Overflow
from typing import Any

_RELATIVE_TOLERANCE = Decimal("1e-6")
_ABSOLUTE_TOLERANCE = Decimal("1e-9")
# Of a whole number and one with decimals, such as 2 and 1.9999999999. It does not grow with the number, because
# 1000000000.0 is wrong for 1000000007.
_WHOLE_TOLERANCE = Decimal("1e-6")
# float() and Decimal() also take 1_000, nan and digits of all scripts.
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?P<point>\.[0-9]*)?|(?P<dot>\.[0-9]+))(?P<exponent>[eE][-+]?[0-9]{1,4})?")

Compare = str | Callable[[Any, Any], bool]


def is_equal(output: Any, expected: Any, compare: Compare = "exact") -> bool:
    """Return whether an output is the expected one.

    Text is compared without white space at the ends of lines and without empty lines at the end. "tolerance" compares
    text word by word in each line, and numbers with decimals or an exponent with a relative tolerance of 1e-6. Whole
    numbers are always compared exactly.

    Raises:
        ValueError: `compare` is unknown.
    """
    if not (isinstance(output, str) and isinstance(expected, str) and isinstance(compare, str)):
        return is_equal_value(output, expected, compare)
    tolerance = _allows_rounding(compare)
    return normalize_text(output) == normalize_text(expected) or (tolerance and _is_close_text(output, expected))


def is_equal_value(output: Any, expected: Any, compare: Compare = "exact") -> bool:
    """Return whether a value is the expected one; as `is_equal`, but text must be equal.

    Raises:
        ValueError: `compare` is unknown.
    """
    if callable(compare):
        return bool(compare(output, expected))
    return _same_value(output, expected, _allows_rounding(compare))


def normalize_text(text: str) -> str:
    """Return the text without white space at the ends of lines and without empty lines at the end."""
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


def _allows_rounding(compare: str) -> bool:
    if compare not in ("exact", "tolerance"):
        raise ValueError(f"compare = {compare!r} is unknown; use exact, tolerance or a function")
    return compare == "tolerance"


def _same_value(output: Any, expected: Any, tolerance: bool) -> bool:
    """Compare two plain values, with tuples and lists alike but True apart from 1."""
    if isinstance(output, bool) or isinstance(expected, bool):
        return output is expected
    if isinstance(output, int | float) and isinstance(expected, int | float):
        return _same_number(output, expected, tolerance)
    if isinstance(output, list | tuple) and isinstance(expected, list | tuple):
        return len(output) == len(expected) and all(
            _same_value(a, b, tolerance) for a, b in zip(output, expected, strict=True)
        )
    if isinstance(output, Mapping) and isinstance(expected, Mapping):
        return output.keys() == expected.keys() and all(
            _same_value(output[key], expected[key], tolerance) for key in expected
        )
    return bool(output == expected)


def _same_number(output: float, expected: float, tolerance: bool) -> bool:
    if output == expected or (output != output and expected != expected):  # both NaN; isnan() refuses large integers
        return True
    num_whole = isinstance(output, int) + isinstance(expected, int)
    is_finite = all(isinstance(number, int) or math.isfinite(number) for number in (output, expected))
    return tolerance and num_whole < 2 and is_finite and _is_close(Decimal(output), Decimal(expected), num_whole == 1)


def _is_close_text(output: str, expected: str) -> bool:
    lines, expected_lines = (text.strip("\r\n").rstrip().split("\n") for text in (output, expected))
    return (
        len(lines) == len(expected_lines)
        and _indentation(lines) == _indentation(expected_lines)
        and all(map(_is_close_line, lines, expected_lines))
    )


def _indentation(lines: list[str]) -> list[int]:
    """Return how far each line begins to the right of the leftmost one: the form of a figure made of characters."""
    begins = [len(line) - len(line.lstrip()) if line.strip() else 0 for line in lines]
    leftmost = min((begin for begin, line in zip(begins, lines, strict=True) if line.strip()), default=0)
    return [max(begin - leftmost, 0) for begin in begins]


def _is_close_line(line: str, expected: str) -> bool:
    words, expected_words = line.split(), expected.split()
    return len(words) == len(expected_words) and all(map(_is_close_word, words, expected_words))


def _is_close_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    numbers = [_NUMBER.fullmatch(text) for text in (word, expected)]
    num_whole = sum(match is not None and not any(match.groups()) for match in numbers)
    return all(numbers) and num_whole < 2 and _is_close(Decimal(word), Decimal(expected), num_whole == 1)


def _is_close(output: Decimal, expected: Decimal, one_is_whole: bool) -> bool:
    try:
        difference = abs(output - expected)
    except Overflow:  # a number of a million digits
        return False
    if one_is_whole:
        return difference <= _WHOLE_TOLERANCE
    return difference <= max(_ABSOLUTE_TOLERANCE, _RELATIVE_TOLERANCE * max(abs(output), abs(expected)))
