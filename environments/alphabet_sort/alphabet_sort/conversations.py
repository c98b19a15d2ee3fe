"""Generates conversations: names in the first turn, further names in each later one."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from alphabet_sort.names import in_order

FIRST_TAG = "alphabetical_sorted"
LATER_TAG = "combined_alphabetical_sorted"
NEW = "// new name!"


@dataclass(frozen=True)
class Turn:
    """The user message of one turn, and the lines of the correct reply."""

    message: str
    lines: list[str]


def make_conversation(
    source: Random, names: Sequence[str], turns: tuple[int, int], names_per_turn: tuple[int, int]
) -> list[Turn]:
    """Make one conversation; both ranges are (least, most), all equally likely."""
    counts = [source.randint(*names_per_turn) for _ in range(source.randint(*turns))]
    picked = source.sample(names, sum(counts))
    made: list[Turn] = []
    known: list[str] = []
    for count in counts:
        new, picked = picked[:count], picked[count:]
        marked = {name: f"{name} {NEW}" for name in new} if known else {}
        known += new
        made.append(Turn(_message(new, first=not made), [marked.get(name, name) for name in in_order(known)]))
    return made


def _message(names: Sequence[str], first: bool) -> str:
    listed = "\n".join(names)
    if first:
        return (
            "Sort these names alphabetically, by first name and then by last name. Write the sorted list between "
            f"<{FIRST_TAG}> and </{FIRST_TAG}>, one name a line.\n\n{listed}"
        )
    return (
        "Here are more names. Merge them into your list and write the whole sorted list between "
        f"<{LATER_TAG}> and </{LATER_TAG}>, one name a line. Put `{NEW}` behind each name that is new in this message, "
        f"and behind no other.\n\n{listed}"
    )
