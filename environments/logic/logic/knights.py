"""Knights and knaves: knights tell the truth, knaves lie; who is what?"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any, ClassVar, Self

from logic.puzzle import Puzzle, list_of

Statement = tuple[str, str, str, str]
"""speaker, "is", person, "knight" or "knave"; or speaker, "same" or "different", person, person."""

MAX_PEOPLE = 8
_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn")
_NUM_PEOPLE = {"easy": 2, "medium": 3, "hard": 5}
_ROLE = re.compile(r"\b(?:knight|knave)", re.IGNORECASE)
_BETWEEN = r"[\s:=*_`\"|,()→>\u2013\u2014-]{1,8}(?:is[\s*_`]{1,4})?(?:(?:an?|the)[\s*_`]{1,4})?"


@dataclass(frozen=True)
class Knights(Puzzle):
    """Statements that exactly one assignment of roles makes consistent."""

    kind: ClassVar[str] = "knights"
    names: Sequence[str]
    statements: Sequence[Statement]
    knights: frozenset[str]

    @classmethod
    def make(cls, source: Random, level: str) -> Self:
        """Draw statements, one a person, until exactly one assignment fits."""
        names = _NAMES[: _NUM_PEOPLE[level]]
        while True:
            statements = [_draw(source, name, [other for other in names if other != name]) for name in names]
            solutions = _solve(names, statements)
            if len(solutions) == 1:
                return cls(names, tuple(statements), solutions[0])

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Self:
        """Read `statements`: lists of four words (see `Statement`)."""
        statements = [_read_statement(statement) for statement in list_of(row, "statements", list)]
        names = sorted({name for s in statements for name in (s[0], s[2], *(() if s[1] == "is" else s[3:]))})
        if len(names) > MAX_PEOPLE:
            raise ValueError(f"there are {len(names)} people, at most {MAX_PEOPLE} are possible")
        solutions = _solve(names, statements)
        if len(solutions) != 1:
            raise ValueError(f"the statements have {len(solutions)} solutions, not one")
        return cls(tuple(names), tuple(statements), solutions[0])

    @property
    def question(self) -> str:
        """The question."""
        said = "\n".join(f'{speaker} says: "{_in_words(rest)}"' for speaker, *rest in self.statements)
        return (
            f"Knights always tell the truth, knaves always lie.\n{said}\n"
            "Answer with a role for each: Name knight, Name knave."
        )

    @property
    def solution(self) -> str:
        """The roles of all people."""
        return ", ".join(f"{name} {'knight' if name in self.knights else 'knave'}" for name in self.names)

    def is_solved_by(self, answer: str) -> bool:
        """Whether the answer gives each person one role, the right one."""
        names = "|".join(map(re.escape, self.names))
        found = re.findall(
            rf"(?<!\w)({names}){_BETWEEN}(knight|knave)(?![a-z])", answer.replace("_", " "), re.IGNORECASE
        )
        right = [(name.lower(), "knight" if name in self.knights else "knave") for name in self.names]
        stated = sorted((name.lower(), role.lower()) for name, role in found)
        return len(_ROLE.findall(answer)) == len(right) and stated == sorted(right)


def _draw(source: Random, speaker: str, others: Sequence[str]) -> Statement:
    if len(others) > 1 and source.random() < 0.4:
        first, second = source.sample(others, 2)
        return (speaker, source.choice(("same", "different")), first, second)
    if source.random() < 0.3:
        return (speaker, source.choice(("same", "different")), speaker, source.choice(others))
    return (speaker, "is", source.choice(others), source.choice(("knight", "knave")))


def _read_statement(statement: list[Any]) -> Statement:
    if len(statement) == 4 and all(
        isinstance(word, str) and re.fullmatch("[A-Za-z]{1,20}", word) for word in statement
    ):
        speaker, relation, first, second = statement
        if relation in ("same", "different") or (relation == "is" and second in ("knight", "knave")):
            return speaker, relation, first, second
    raise ValueError(
        f'a statement is [speaker, "is", name, "knight"], or with "same" and two names, not {statement!r:.80}'
    )


def _solve(names: Sequence[str], statements: Sequence[Statement]) -> list[frozenset[str]]:
    """Return the sets of knights for which each statement is true exactly if its speaker is a knight."""
    chosen = (
        frozenset(name for name, is_knight in zip(names, roles, strict=True) if is_knight)
        for roles in product((True, False), repeat=len(names))
    )
    return [knights for knights in chosen if all(_is_true(s, knights) == (s[0] in knights) for s in statements)]


def _is_true(statement: Statement, knights: frozenset[str]) -> bool:
    _, relation, first, second = statement
    if relation == "is":
        return (first in knights) == (second == "knight")
    return ((first in knights) == (second in knights)) == (relation == "same")


def _in_words(rest: Sequence[str]) -> str:
    relation, first, second = rest
    if relation == "is":
        return f"{first} is a {second}."
    return f"{first} and {second} are {'the same' if relation == 'same' else 'different'}."
