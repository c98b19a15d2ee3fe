"""Ordering: put people in a row from clues about their places."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from random import Random
from typing import Any, ClassVar, Self

from logic.puzzle import Puzzle, list_of

Clue = tuple[str, str, str]
"""name, "before", "next" (directly before) or "apart" (not beside), name; or name, "at", place from 1."""

MAX_PEOPLE = 7
_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn")
_NUM_PEOPLE = {"easy": 3, "medium": 4, "hard": 6}
_WORDS = {
    "before": "{} is somewhere to the left of {}.",
    "next": "{} is directly to the left of {}.",
    "apart": "{} is not beside {}.",
    "at": "{} is number {} from the left.",
}


@dataclass(frozen=True)
class Ordering(Puzzle):
    """Clues that exactly one order satisfies."""

    kind: ClassVar[str] = "ordering"
    names: Sequence[str]
    clues: Sequence[Clue]
    order: Sequence[str]

    @classmethod
    def make(cls, source: Random, level: str) -> Self:
        """Add clues about a random order until no other order fits."""
        names = _NAMES[: _NUM_PEOPLE[level]]
        order = tuple(source.sample(names, len(names)))
        clues: list[Clue] = []
        fitting = list(permutations(names))
        while len(fitting) > 1:
            clue = _draw(source, order)
            left = [candidate for candidate in fitting if _holds(clue, candidate)]
            if len(left) < len(fitting):
                fitting, clues = left, [*clues, clue]
        return cls(names, tuple(clues), order)

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Self:
        """Read `names` and `clues`: lists of three words (see `Clue`)."""
        names = list_of(row, "names", str)
        if len(names) > MAX_PEOPLE or len(set(names)) < len(names) or not all(name.isalnum() for name in names):
            raise ValueError(f"`names` must have at most {MAX_PEOPLE} different words")
        clues = [_read_clue(clue, names) for clue in list_of(row, "clues", list)]
        fitting = [order for order in permutations(names) if all(_holds(clue, order) for clue in clues)]
        if len(fitting) != 1:
            raise ValueError(f"the clues have {len(fitting)} solutions, not one")
        return cls(tuple(names), tuple(clues), fitting[0])

    @property
    def question(self) -> str:
        """The question."""
        clues = "\n".join(_WORDS[relation].format(first, second) for first, relation, second in self.clues)
        return f"{', '.join(self.names)} stand in a row.\n{clues}\nAnswer with the names from left to right."

    @property
    def solution(self) -> str:
        """The order."""
        return ", ".join(self.order)

    def is_solved_by(self, answer: str) -> bool:
        """Whether the words of the answer are the names in the right order, with or without "and"."""
        names = [name.lower() for name in self.order]
        words = [word.lower() for word in re.findall(r"[^\W_]+", answer)]
        return [word for word in words if word in names or word != "and"] == names


def _draw(source: Random, order: Sequence[str]) -> Clue:
    i, j = sorted(source.sample(range(len(order)), 2))
    relation = source.choice(("before", "before", "next", "apart", "at"))
    if relation == "at":
        return (order[i], "at", str(i + 1))
    if relation == "next":
        return (order[i], "next", order[i + 1])
    if relation == "apart" and j - i > 1:
        return (order[j], "apart", order[i])
    return (order[i], "before", order[j])


def _read_clue(clue: list[Any], names: Sequence[str]) -> Clue:
    if len(clue) == 3 and clue[0] in names and clue[1] in _WORDS:
        first, relation, second = clue
        if (relation == "at" and str(second) in map(str, range(1, len(names) + 1))) or second in names:
            return first, relation, str(second)
    raise ValueError(f'a clue is [name, "before", name], with "next" or "apart", or [name, "at", 2], not {clue!r:.80}')


def _holds(clue: Clue, order: Sequence[str]) -> bool:
    first, relation, second = clue
    place = order.index(first)
    if relation == "at":
        return place + 1 == int(second)
    distance = order.index(second) - place
    return {"before": distance > 0, "next": distance == 1, "apart": abs(distance) > 1}[relation]
