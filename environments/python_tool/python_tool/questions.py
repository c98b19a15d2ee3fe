"""Questions that take a program: generated from a seed, or read from rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from fractions import Fraction
from math import gcd
from random import Random

from .environment_tools.numbers import number_of
from .environment_tools.rows import Row, text_of

Maker = Callable[[Random], tuple[str, int]]


@dataclass(frozen=True)
class Question:
    """A question and its number."""

    text: str
    answer: Fraction


def make_questions(seed: int, part: str) -> Iterator[Question]:
    """Yield questions without end, the same for the same seed."""
    source = Random(f"python_tool {part} {seed}")
    while True:
        text, answer = source.choice(_MAKERS)(source)
        yield Question(text, Fraction(answer))


def read_question(row: Row) -> Question:
    """Return the question of a row with `question` and `answer`, a number.

    Raises:
        ValueError: the row is malformed.
    """
    answer = number_of(text_of(row, "answer"))
    if answer is None:
        raise ValueError(f"`answer` is not a number: {row['answer']!r:.40}")
    return Question(text_of(row, "question", "problem", "prompt"), answer)


def _digit_sum(source: Random) -> tuple[str, int]:
    base, exponent = source.randint(2, 99), source.randint(20, 200)
    return f"What is the sum of the digits of {base} to the power of {exponent}?", sum(map(int, str(base**exponent)))


def _primes(source: Random) -> tuple[str, int]:
    low = source.randint(10, 5000)
    high = low + source.randint(50, 2000)
    answer = sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(low, high + 1))
    return f"How many prime numbers are there from {low} to {high}?", answer


def _days(source: Random) -> tuple[str, int]:
    first = date(source.randint(1900, 2020), source.randint(1, 12), source.randint(1, 28))
    last = first + timedelta(days=source.randint(100, 30_000))
    return f"How many days after {first} is {last}?", (last - first).days


def _multiples(source: Random) -> tuple[str, int]:
    a, b, limit = source.randint(3, 15), source.randint(3, 15), source.randint(500, 9999)
    answer = sum(n for n in range(limit) if n % a == 0 or n % b == 0)
    return f"What is the sum of all positive integers below {limit} that are multiples of {a} or {b}?", answer


def _coprime(source: Random) -> tuple[str, int]:
    number = source.randint(200, 9999)
    answer = sum(gcd(number, other) == 1 for other in range(1, number + 1))
    return f"How many integers from 1 to {number} have no common divisor with {number} but 1?", answer


def _collatz(source: Random) -> tuple[str, int]:
    number = start = source.randint(100, 99_999)
    steps = 0
    while number != 1:
        number, steps = (number // 2 if number % 2 == 0 else 3 * number + 1), steps + 1
    return (
        f"Halve a number if it is even, else multiply it by 3 and add 1. How many steps lead from {start} to 1?",
        steps,
    )


_MAKERS: tuple[Maker, ...] = (_digit_sum, _primes, _days, _multiples, _coprime, _collatz)
