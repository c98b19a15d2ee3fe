"""What all kinds of puzzles have in common."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from random import Random
from typing import Any, ClassVar, Self

LEVELS = ("easy", "medium", "hard")


class Puzzle(ABC):
    """One puzzle. A checker accepts every solution, not only the one that the generator knows.

    Attributes:
        solution: a correct answer.
    """

    kind: ClassVar[str]
    solution: str

    @classmethod
    @abstractmethod
    def make(cls, source: Random, level: str) -> Self:
        """Make a puzzle that has a solution."""

    @classmethod
    @abstractmethod
    def read(cls, row: Mapping[str, Any]) -> Self:
        """Read a puzzle from a row of data.

        Raises:
            ValueError: the row is malformed, or the puzzle has no solution.
        """

    @property
    @abstractmethod
    def question(self) -> str:
        """The question, with the form of the answer."""

    @abstractmethod
    def is_solved_by(self, answer: str) -> bool:
        """Whether an answer is correct. It is hostile text of at most `MAX_ANSWER` characters."""


def list_of(row: Mapping[str, Any], column: str, kind: type) -> list[Any]:
    """Return a column of a row that is a list of one type.

    Raises:
        ValueError: it is missing or something else.
    """
    value = row.get(column)
    if not isinstance(value, list) or not value or not all(type(item) is kind for item in value):
        raise ValueError(f"`{column}` must be a list of {kind.__name__}")
    return value
