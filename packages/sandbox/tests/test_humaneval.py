"""Problems of HumanEval's form: all correct solutions pass, and nothing else.

A few problems of our own by default. `PRIME_RL_HUMANEVAL=humaneval.jsonl` runs the data set (164 problems).
"""

import asyncio
import json
import os
from pathlib import Path

import pytest
from tests.support.isolation import needs_isolation

from prime_rl_sandbox.sandbox import Sandbox

pytestmark = [pytest.mark.asyncio, needs_isolation]

PROBLEMS = [
    {
        "prompt": 'def add(a: int, b: int) -> int:\n    """Return the sum."""\n',
        "entry_point": "add",
        "canonical_solution": "    return a + b\n",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n",
    },
    {
        "prompt": (
            "def evaluate(xs: list, x: float) -> float:\n    return sum(c * x**i for i, c in enumerate(xs))\n\n\n"
            'def find_zero(xs: list) -> float:\n    """Return a zero of a linear polynomial."""\n'
        ),
        "entry_point": "find_zero",
        "canonical_solution": "    return -xs[0] / xs[1]\n",
        "test": (
            "METADATA = {}\n\ndef check(candidate):\n    import random\n    for _ in range(50):\n"
            "        xs = [random.randint(1, 9), random.randint(1, 9)]\n"
            "        assert abs(evaluate(xs, candidate(list(xs)))) < 1e-4\n"
        ),
    },
]
FAKES = (
    "    import os; os._exit(0)\n",
    "    import builtins; builtins.AssertionError = BaseException; builtins.abs = lambda x: 0\n",
    "    class A(float):\n        def __eq__(self, other): return True\n        def __lt__(self, other): return True\n"
    "        def __abs__(self): return 0.0\n        __hash__ = None\n    return A(12345)\n",
)


def problems():
    if path := os.environ.get("PRIME_RL_HUMANEVAL"):
        return [json.loads(line) for line in Path(path).read_text().splitlines()]
    return PROBLEMS


async def run_all(sandbox, bodies):
    """Return the results of (problem, body of the function)."""
    return await asyncio.gather(
        *(
            sandbox.run_asserts(
                problem["prompt"] + body,
                f"{problem['test']}\ncheck({problem['entry_point']})",
                [problem["entry_point"]],
                setup=problem["prompt"],
                timeout_ms=20_000,
            )
            for problem, body in bodies
        )
    )


async def test_humaneval_canonical_solutions_pass_and_nothing_else():
    rows = problems()
    async with Sandbox() as sandbox:
        right = await run_all(sandbox, [(row, row["canonical_solution"]) for row in rows])
        assert [result for result in right if not result.passed] == []
        empty = await run_all(sandbox, [(row, "    return None\n") for row in rows])
        assert [row["entry_point"] for row, result in zip(rows, empty, strict=True) if result.passed] == []
        for fake in FAKES:
            results = await run_all(sandbox, [(row, fake) for row in rows])
            assert [row["entry_point"] for row, result in zip(rows, results, strict=True) if result.passed] == [], fake
