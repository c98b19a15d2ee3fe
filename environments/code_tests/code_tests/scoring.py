"""Runs the program of a reply against the tests of its problem, in the sandbox."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from code_tests.problems import Problem

from .environment_tools.answers import final_part

if TYPE_CHECKING:
    from prime_rl_sandbox.sandbox import Sandbox

_FENCE = re.compile(
    r"(?P<indentation>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*\{?\.?(?P<language>[\w+#.-]*)\}?(?P<text>[ \t]*[^`~]*)"
)
_PYTHON = ("python", "python3", "py", "py3")
_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)
_SYNTAX_ERRORS = ("SyntaxError:", "IndentationError:", "TabError:")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one reply; `num_passed` of `num_tests`."""

    num_tests: int
    num_passed: int = 0
    num_timeouts: int = 0
    compiled: bool = False
    milliseconds: float = 0.0


def extract_code(reply: str, functions: Sequence[str] = ()) -> str | None:
    """Return the program: one of the fenced blocks after the reasoning; None if there is none.

    It is the last block that defines one of `functions`, among those the last one that is marked as Python, otherwise
    the last one without a language, otherwise the last one: others are examples, such as the program's output.
    """
    names = "|".join(map(re.escape, ["Solution", *functions]))
    defines = re.compile(
        rf"^[ \t]*(?:(?:async[ ]+)?(?:def|class)[ ]+(?:{names})\b|(?:{names})[ ]?(?::[^=\n]+)?=[^=]"
        rf"|(?:from[ ][\w.]+[ ])?import[ ][^\n]*\bas[ ](?:{names})\b)",
        re.MULTILINE,
    )
    best: tuple[tuple[bool, int], str] | None = None
    for language, code in _blocks(final_part(reply)):
        rank = 2 if language in _PYTHON else 1 if not language else 0
        key = (bool(functions) and bool(defines.search(code)), rank)
        if best is None or key >= best[0]:
            best = key, code
    return best[1] if best else None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and code of each fenced block of Markdown. In one pass: what is searched is untrusted."""
    fence, language, code = "", "", [""]
    indentation = 0
    for line in text.replace("\r\n", "\n").split("\n"):
        match = _FENCE.fullmatch(line)
        if fence and match and match["fence"].startswith(fence) and len(match["indentation"]) < indentation + 4:
            # Text may stand behind the last fence; a single word behind it opens the next block.
            yield language, "".join(code)
            is_open = bool(match["language"]) and not match["text"]
        elif not fence and match:
            is_open = True
        else:
            if fence:
                code.append(_without_indentation(line, indentation) + "\n")
            continue
        fence, language, code = match["fence"] if is_open else "", match["language"].lower(), []
        indentation = len(match["indentation"])


def _without_indentation(line: str, indentation: int) -> str:
    return line[:indentation].lstrip(" \t") + line[indentation:]


async def grade(sandbox: "Sandbox", reply: str, problem: Problem, timeout_ms: float, max_tests: int) -> Outcome:
    """Run the tests of a problem, at most `max_tests` of them.

    Raises:
        SandboxError: the sandbox failed. Nothing is known about the reply.
    """
    from prime_rl_sandbox.execution import TestCase, Verdict

    cases, asserts = problem.cases[:max_tests], problem.asserts[:max_tests]
    num_tests = len(cases) + len(asserts)
    code = extract_code(reply, problem.functions)
    if code is None:
        return Outcome(num_tests)
    # Python wants them first, before the prefix.
    futures = "".join(f"{line}\n" for line in _FUTURE.findall(code)) if problem.prefix else ""
    code = futures + problem.prefix + (_FUTURE.sub("", code) if futures else code) + problem.suffix
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
