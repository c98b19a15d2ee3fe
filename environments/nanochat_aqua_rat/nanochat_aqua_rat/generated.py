"""Questions generated from a seed, for tests and runs without a data set: "y + 1 = 4. What is y?"."""

import string
from collections.abc import Iterator
from random import Random

from .environment_tools.letters import LETTERS
from .environment_tools.rows import Row


def make_rows(count: int, seed: int, split: str) -> Iterator[Row]:
    """Yield `count` rows in the form of AQuA-RAT; the solution is 1 to 5, and the options are these in order.

    There are 130 different questions, so that a tiny model can learn them. Splits have them in different orders.
    """
    random = Random(f"{seed} {split}")
    values = range(1, len(LETTERS) + 1)
    for _ in range(count):
        unknown, solution = random.choice(string.ascii_lowercase), random.choice(values)
        yield {
            "question": f"{unknown} + 1 = {solution + 1}. What is {unknown}?",
            "options": [str(value) for value in values],
            "rationale": f"{unknown} = {solution + 1} - 1 = {solution}",
            "correct": LETTERS[solution - 1],
        }
