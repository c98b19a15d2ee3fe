"""Countdown: combine numbers to a target with + - * /."""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from random import Random
from typing import Any, ClassVar, Self

from logic.puzzle import Puzzle, list_of

from .environment_tools.numbers import plain_text

MAX_NUMBERS = 6
MAX_CHARS = 200
_NUM_NUMBERS = {"easy": 3, "medium": 4, "hard": 5}
_EXPRESSION = re.compile(r"[0-9+*/() -]+")
_TIMES = re.compile(r"(?<=[0-9)])\s*[xX]\s*(?=[0-9(])")
_PARENTHESES = str.maketrans("[]{}", "()()")
_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


@dataclass(frozen=True)
class Countdown(Puzzle):
    """Use each number at most once and reach the target."""

    kind: ClassVar[str] = "countdown"
    numbers: Sequence[int]
    target: int
    solution: str

    @classmethod
    def make(cls, source: Random, level: str) -> Self:
        """Combine random numbers with random operations to a target from 1 to 999."""
        while True:
            numbers = [source.randint(1, 25) for _ in range(_NUM_NUMBERS[level])]
            terms = [(Fraction(number), str(number)) for number in numbers]
            while len(terms) > 1:
                (a, left), (b, right) = (terms.pop(source.randrange(len(terms))) for _ in range(2))
                operator = source.choice("+-*/" if b else "+-*")
                terms.append((_apply(operator, a, b), f"({left} {operator} {right})"))
            [(value, expression)] = terms
            if value.denominator == 1 and 1 <= value <= 999 and value not in numbers:
                return cls(tuple(numbers), int(value), expression[1:-1])

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Self:
        """Read `numbers` and `target` (or `nums`), and search for a solution."""
        numbers = list_of(row, "numbers" if "numbers" in row else "nums", int)
        target = row.get("target")
        if type(target) is not int or len(numbers) > MAX_NUMBERS:
            raise ValueError(f"countdown needs an integer `target` and at most {MAX_NUMBERS} numbers")
        solution = _search([(Fraction(number), str(number)) for number in numbers], Fraction(target))
        if solution is None:
            raise ValueError(f"no combination of {numbers} is {target}")
        return cls(tuple(numbers), target, solution)

    @property
    def question(self) -> str:
        """The question."""
        return (
            f"Reach {self.target} with the numbers {', '.join(map(str, self.numbers))}. Use each number at most once, "
            "with + - * / and parentheses. Answer with the expression."
        )

    def is_solved_by(self, answer: str) -> bool:
        """Whether an expression uses only the numbers and has the value; `= target` may stand behind or before it."""
        if len(answer) > MAX_CHARS:
            return False
        text = _TIMES.sub("*", plain_text(answer.replace("$", "")).strip(" \t\n.^")).translate(_PARENTHESES)
        sides = [side.strip() for side in text.split("=")]
        expression = next((side for side in sides if side != str(self.target)), sides[0])
        sides.remove(expression)
        if not _EXPRESSION.fullmatch(expression) or any(side != str(self.target) for side in sides):
            return False
        try:
            used: list[int] = []
            value = _evaluate(ast.parse(expression, mode="eval").body, used)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return False
        left = list(self.numbers)
        for number in used:
            if number not in left:
                return False
            left.remove(number)
        return value == self.target


def _evaluate(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        if len(used) == MAX_NUMBERS:
            raise ValueError("too many numbers")
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate(node.left, used), _evaluate(node.right, used)
        return _apply(_OPERATORS[type(node.op)], left, right)
    raise ValueError("only numbers, + - * / and parentheses")


def _apply(operator: str, a: Fraction, b: Fraction) -> Fraction:
    return a + b if operator == "+" else a - b if operator == "-" else a * b if operator == "*" else a / b


def _search(terms: Sequence[tuple[Fraction, str]], target: Fraction) -> str | None:
    """Return an expression of some of the terms with the value of the target."""
    for value, text in terms:
        if value == target:
            return text
    for i, j in combinations(range(len(terms)), 2):
        rest = [term for k, term in enumerate(terms) if k not in (i, j)]
        for (a, left), (b, right) in ((terms[i], terms[j]), (terms[j], terms[i])):
            for operator in "+-*/" if b else "+-*":
                combined = (_apply(operator, a, b), f"({left} {operator} {right})")
                if found := _search([*rest, combined], target):
                    return found
    return None
