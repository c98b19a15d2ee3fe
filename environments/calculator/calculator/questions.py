"""Generates questions: the same seed gives the same questions on every machine."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Level:
    """How hard the questions are: which operations, how many, and the largest number in them."""

    operators: str
    min_operations: int
    max_operations: int
    max_number: int


LEVELS = {
    "easy": Level("+-", 1, 2, 20),
    "medium": Level("+-*", 2, 4, 100),
    "hard": Level("+-*/", 4, 7, 1000),
}
MAX_OPERATIONS = 20
_LOOSEST = {"+": 1, "-": 1, "*": 2, "/": 2}


def make_questions(seed: int, part: str, level: Level) -> Iterator[tuple[str, int]]:
    """Yield expressions with integer values, without end. `part` separates train and eval.

    Raises:
        ValueError: an invalid level.
    """
    if not 1 <= level.min_operations <= level.max_operations <= MAX_OPERATIONS:
        raise ValueError(
            f"need 1 <= min_operations <= max_operations <= {MAX_OPERATIONS}, "
            f"not {level.min_operations} and {level.max_operations}"
        )
    if level.max_number < 2:
        raise ValueError(f"max_number must be at least 2, not {level.max_number}")
    # Seeded by text, which `random` hashes the same way everywhere, so that neighbouring seeds share nothing.
    source = Random(f"calculator {part} {seed}")
    while True:
        operations = source.randint(level.min_operations, level.max_operations)
        text, value, _ = _expression(source, level, operations)
        yield text, value


def _expression(source: Random, level: Level, operations: int) -> tuple[str, int, int]:
    """Return an expression, its value, and how tightly it binds: 1 for sums, 2 for products, 3 for a number."""
    if operations == 0:
        number = source.randint(1, level.max_number)
        return str(number), number, 3
    operator = source.choice(level.operators)
    if operator == "/" and operations > 1:
        operator = source.choice("+-*")  # only numbers are divided, so that the result is whole
    if operator == "/":
        divisor = source.randint(2, max(2, min(12, level.max_number)))
        quotient = source.randint(1, max(1, level.max_number // divisor))
        return f"{divisor * quotient} / {divisor}", quotient, 2
    on_the_left = source.randint(0, operations - 1)
    left, a, left_binding = _expression(source, level, on_the_left)
    right, b, right_binding = _expression(source, level, operations - 1 - on_the_left)
    binding = _LOOSEST[operator]
    if left_binding < binding:
        left = f"({left})"
    # a - (b + c) and a * (b / c) need them on the right; they never hurt there.
    if right_binding <= binding:
        right = f"({right})"
    value = a + b if operator == "+" else a - b if operator == "-" else a * b
    return f"{left} {operator} {right}", value, binding
