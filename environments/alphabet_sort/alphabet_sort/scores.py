"""Similarity of a reply to the sorted list: pure functions, from 0 to 1."""

from collections.abc import Sequence
from difflib import SequenceMatcher

# A list many times as long as the right one is worth nothing, and is not worth its comparison, which takes long.
LONGEST = 4


def listed(text: str, tag: str) -> list[str] | None:
    """Return the lines between <tag> and </tag>; None if there is not exactly one such list behind the reasoning."""
    text = text.rpartition("</think>")[2]
    opening, closing = f"<{tag}>", f"</{tag}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    inside, closed, _ = text.partition(opening)[2].partition(closing)
    if not closed:
        return None
    lines = (" ".join(line.split()) for line in inside.split("\n"))
    return [line for line in lines if line]


def similarity(lines: Sequence[str] | None, right: Sequence[str]) -> float:
    """Return the share of characters that two lists have in common in the same order, by `difflib`; 1 if equal."""
    if lines is None:
        return 0.0
    if lines == right:
        return 1.0
    text, wanted = "\n".join(lines), "\n".join(right)
    if len(text) > LONGEST * len(wanted):
        return 0.0
    return SequenceMatcher(None, text, wanted, autojunk=False).ratio()
