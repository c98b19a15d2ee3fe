"""Runs the program of a reply against the tests of its problem, in the sandbox of prime-rl."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from code_tests.problems import Problem

from .environment_tools.answers import final_part

if TYPE_CHECKING:
    from prime_rl.sandbox.sandbox import Sandbox

_SYNTAX_ERRORS = ("SyntaxError:", "IndentationError:", "TabError:")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one reply; `num_passed` of `num_tests`."""

    num_tests: int
    num_passed: int = 0
    num_timeouts: int = 0
    compiled: bool = False
    milliseconds: float = 0.0


def extract_code(reply: str) -> str | None:
    """Return the last fenced block after the reasoning; None if there is none."""
    code, begin, lines = None, None, final_part(reply).split("\n")
    for number, line in enumerate(lines):  # in one pass: what is searched is untrusted
        if begin is None and line.lstrip(" \t").startswith("```") and number + 1 < len(lines):
            begin = number + 1
        elif begin is not None and line.strip(" \t") == "```":
            code, begin = "".join(f"{inner}\n" for inner in lines[begin:number]), None
    return code


async def grade(sandbox: "Sandbox", reply: str, problem: Problem, timeout_ms: float, max_tests: int) -> Outcome:
    """Run the tests of a problem, at most `max_tests` of them.

    Raises:
        SandboxError: the sandbox failed. Nothing is known about the reply.
    """
    from prime_rl.sandbox.execution import TestCase, Verdict

    cases, asserts = problem.cases[:max_tests], problem.asserts[:max_tests]
    num_tests = len(cases) + len(asserts)
    code = extract_code(reply)
    if code is None:
        return Outcome(num_tests)
    code = problem.prefix + code + problem.suffix
    tests = [TestCase(case.input, case.expected, case.function, case.args, compare="tolerance") for case in cases]
    results: list[Any] = await sandbox.execute_code(code, tests, timeout_ms)
    results += await asyncio.gather(
        *(
            sandbox.run_asserts(code, block, problem.functions, setup=problem.setup, timeout_ms=timeout_ms)
            for block in asserts
        )
    )
    return Outcome(
        num_tests,
        sum(result.passed for result in results),
        sum(result.verdict is Verdict.TIMEOUT for result in results),
        not all(_last_line(result).startswith(_SYNTAX_ERRORS) for result in results),
        sum(result.latency_ms for result in results),
    )


def _last_line(result: Any) -> str:
    """Return the last line of an error. The code is not compiled here: hostile text can crash Python's parser."""
    text = result.error if hasattr(result, "error") else result.stderr
    return str(text.strip().rpartition("\n")[2])
