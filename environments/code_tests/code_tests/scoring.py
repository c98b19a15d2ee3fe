"""Runs the program of a reply against the tests of its problem, in the sandbox of prime-rl."""

import asyncio
import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from code_tests.problems import Problem

from .environment_tools.answers import final_part

if TYPE_CHECKING:
    from prime_rl.sandbox.sandbox import Sandbox

_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
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
    blocks = _FENCE.findall(final_part(reply))
    return blocks[-1] if blocks else None


class SandboxRunner:
    """Owns the sandbox of one event loop, which starts with the first reply and ends with the process.

    Args:
        backend: `bwrap`, or `unsafe-subprocess` without isolation.
        num_jails: jails, None for one per processor.
    """

    def __init__(self, backend: str, num_jails: int | None) -> None:
        self._backend, self._num_jails = backend, num_jails
        self._sandbox: Sandbox | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()

    def check(self) -> None:
        """Start a sandbox and its self-test once, in another thread, so that a machine without one fails at the start.

        Does nothing without prime-rl, which the package itself does not need.

        Raises:
            ConfigError: this machine cannot isolate code. The message contains the fix.
        """
        if importlib.util.find_spec("prime_rl") is None:
            return

        async def start() -> None:
            runner = SandboxRunner(self._backend, 1)
            await runner.open()
            await runner.close()

        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: asyncio.run(start())).result()

    async def open(self) -> "Sandbox":
        """Return the sandbox of the running loop.

        Raises:
            ConfigError: this machine cannot isolate code.
        """
        async with self._lock:
            loop = asyncio.get_running_loop()
            if self._sandbox is None or self._loop is not loop:
                from prime_rl.sandbox.sandbox import Sandbox

                sandbox = Sandbox(self._backend, num_jails=self._num_jails)  # type: ignore[arg-type]
                self._sandbox, self._loop = await sandbox.__aenter__(), loop
            return self._sandbox

    async def close(self) -> None:
        """End the sandbox."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.__aexit__(None, None, None)

    async def grade(self, reply: str, problem: Problem, timeout_ms: float, max_tests: int) -> Outcome:
        """Run the tests of a problem, at most `max_tests` of them.

        Raises:
            SandboxError: the sandbox failed. Nothing is known about the reply.
        """
        cases, asserts = problem.cases[:max_tests], problem.asserts[:max_tests]
        num_tests = len(cases) + len(asserts)
        code = extract_code(reply)
        if code is None:
            return Outcome(num_tests)
        code = problem.prefix + code
        from prime_rl.sandbox.execution import TestCase, Verdict

        sandbox = await self.open()
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
