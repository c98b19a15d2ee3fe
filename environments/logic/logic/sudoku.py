"""Sudoku with four rows: each row, column and 2 x 2 box has 1 to 4."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Self

from logic.puzzle import Puzzle

_NUM_BLANKS = {"easy": 4, "medium": 8, "hard": 11}
_UNITS = (
    *(tuple(range(4 * row, 4 * row + 4)) for row in range(4)),
    *(tuple(range(column, 16, 4)) for column in range(4)),
    *(tuple(corner + offset for offset in (0, 1, 4, 5)) for corner in (0, 2, 8, 10)),
)


@dataclass(frozen=True)
class Sudoku(Puzzle):
    """A grid of 16 characters, row by row; `.` is blank."""

    kind: ClassVar[str] = "sudoku"
    grid: str
    solution: str

    @classmethod
    def make(cls, source: Random, level: str) -> Self:
        """Shuffle a full grid and blank some cells."""
        full = _shuffle(source)
        blanks = source.sample(range(16), _NUM_BLANKS[level])
        return cls("".join("." if cell in blanks else digit for cell, digit in enumerate(full)), _in_rows(full))

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Self:
        """Read `grid`: 16 characters of 1 to 4 and `.` or 0, white space ignored."""
        grid = re.sub(r"\s", "", str(row.get("grid", ""))).replace("0", ".")
        if not re.fullmatch(r"[1-4.]{16}", grid):
            raise ValueError("`grid` must have 16 characters of 1 to 4 and .")
        if (full := _solve(grid)) is None:
            raise ValueError("`grid` has no solution")
        return cls(grid, _in_rows(full))

    @property
    def question(self) -> str:
        """The question."""
        return (
            "Fill the blanks so that each row, each column and each 2 x 2 box has 1 to 4. "
            f"Answer with the four rows.\n{_in_rows(self.grid)}"
        )

    def is_solved_by(self, answer: str) -> bool:
        """Whether the 16 digits of the answer keep those given and are a valid grid."""
        full = re.sub(r"[\s|,;+\[\]`*-]", "", answer)
        if not re.fullmatch(r"[1-4]{16}", full, re.ASCII):
            return False
        kept = all(given in (".", digit) for given, digit in zip(self.grid, full, strict=True))
        return kept and all(len({full[cell] for cell in unit}) == 4 for unit in _UNITS)


def _in_rows(grid: str) -> str:
    return "\n".join(grid[start : start + 4] for start in range(0, 16, 4))


def _shuffle(source: Random) -> str:
    """Permute rows, columns and digits of a full grid in ways that keep it valid."""
    digits = source.sample("1234", 4)
    rows, columns = (
        [2 * band + line for band in source.sample((0, 1), 2) for line in source.sample((0, 1), 2)] for _ in range(2)
    )
    base = ("1234", "3412", "2143", "4321")
    return "".join(digits[int(base[row][column]) - 1] for row in rows for column in columns)


def _solve(grid: str) -> str | None:
    if any(len(given) != len(set(given)) for given in ([grid[i] for i in unit if grid[i] != "."] for unit in _UNITS)):
        return None
    cell = grid.find(".")
    if cell < 0:
        return grid
    return next((full for digit in "1234" if (full := _solve(grid[:cell] + digit + grid[cell + 1 :]))), None)
