"""The number that a reply gives as its answer. Pure functions of text, in one pass."""

import re
from decimal import Decimal

from .answers import final_part, last_boxed

# ASCII digits only; commas group thousands. A sign counts where nothing stands before it that it could be subtracted
# from.
_NUMBER = re.compile(
    r"""(?<!\w)(?<![0-9]\.)(?:(?<![)\]}%])-)?\$?
        (?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?
      | (?<![\w.])\.[0-9]+""",
    re.VERBOSE,
)
# Ignored next to a number in a box: units in words, thin spaces, currency and percent signs.
_DECORATION = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{[^{}]*\}|\\[,;:! ]|\\?[$%]|\\(?:left|right)|~")

# More digits than any answer has. Comparing a number of a million digits would take too long.
MAX_DIGITS = 40


def numbers_in(text: str) -> list[Decimal]:
    """Return all numbers of a text; those with more than `MAX_DIGITS` characters become NaN, which equals nothing."""
    found = (match.group().replace(",", "").replace("$", "") for match in _NUMBER.finditer(text))
    return [Decimal(number) if len(number) <= MAX_DIGITS else Decimal("NaN") for number in found]


def final_number(text: str) -> Decimal | None:
    r"""Return the number that a reply gives as its answer, or None.

    Only the text after the last `</think>` counts. If it contains a `\boxed{}`, the last box must contain exactly one
    number; units in `\text{}` and currency or percent signs are allowed. Otherwise the last number of the text is the
    answer.
    """
    text = final_part(text).replace("\u2212", "-")
    boxed = last_boxed(text)
    if boxed is None:
        numbers = numbers_in(text)
        return numbers[-1] if numbers else None
    bare = _DECORATION.sub("", boxed.replace("{,}", ",")).strip("() \t\n").removesuffix(".")
    return numbers_in(bare)[0] if _NUMBER.fullmatch(bare) else None
