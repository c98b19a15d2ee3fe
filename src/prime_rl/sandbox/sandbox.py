"""`Sandbox`: runs model-written code in milliseconds, and safely.

async with Sandbox() as sandbox:
    result = await sandbox.run("print(1 + 1)")
    tests = [TestCase(input="2 3", expected="5"), TestCase(function="add", args=[2, 3], expected=5)]
    results = await sandbox.execute_code(code, tests, timeout_ms=1000)
    async with sandbox.session() as session:
        await session.run("x = 1")
        await session.run("x + 1")      # value "2"
"""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from loguru import logger

from prime_rl.core.errors import ConfigError
from prime_rl.sandbox import escape_test
from prime_rl.sandbox.asserts import run_asserts
from prime_rl.sandbox.comparison import is_equal
from prime_rl.sandbox.execution import (
    AssertResult,
    ExecutionRequest,
    ExecutionResult,
    SandboxError,
    SandboxLimits,
    TestCase,
    TestResult,
    Verdict,
    check_request,
)
from prime_rl.sandbox.function_call import build_call, read_call_result
from prime_rl.sandbox.jail.backend import build_start
from prime_rl.sandbox.jail.bubblewrap import explain_refusal
from prime_rl.sandbox.jail.jail import JailStartError
from prime_rl.sandbox.jail.jail_pool import JailPool
from prime_rl.sandbox.prime.prime_jail import build_prime_start
from prime_rl.sandbox.session import Answer, Session
from prime_rl.sandbox.settings import BACKENDS, BackendName, current_settings
from prime_rl.sandbox.wasm.component import build_component, build_wasm_start

_NUM_ATTEMPTS = 3
_REMOTE_MEMORY_BYTES = 4 * 2**30


class Sandbox:
    """A pool of isolated interpreters. Use it with `async with`; one instance serves any number of tasks of one loop.

    Backend, limits, num_jails and max_running that are None come from `current_settings`, the run's configuration.

    Args:
        backend: `bwrap` isolates by the kernel. `wasm` runs Python code in WebAssembly. `prime` uses remote machines.
            `unsafe-subprocess` isolates nothing, and logs a warning.
        limits: limits of each execution.
        num_jails: jails; one per processor, or one remote machine, if neither this nor the settings say otherwise.
        num_warm: prepared processes per jail.
        max_running: executions at once in each jail; further ones wait.
        preload: modules that each execution finds imported already.
        paths: folders with further packages, readable in the sandbox and on its module path; not with `wasm`, `prime`.
        python: the interpreter, None for this process's, or the system's if the user of the jail cannot read it; not
            with `wasm` and `prime`, which have their own.

    Raises:
        ConfigError: what the backend needs is missing, or it does not have one of these options.
    """

    def __init__(
        self,
        backend: BackendName | None = None,
        *,
        limits: SandboxLimits | None = None,
        num_jails: int | None = None,
        num_warm: int = 8,
        max_running: int | None = None,
        preload: Sequence[str] = escape_test.DEFAULT_PRELOAD,
        paths: Sequence[Path] = (),
        python: Path | None = None,
    ) -> None:
        settings = current_settings()
        self.backend, self.limits = backend or settings.backend, limits or settings.limits
        if self.backend not in BACKENDS:
            raise ConfigError(f"sandbox backend {self.backend!r} is unknown; use one of {', '.join(BACKENDS)}")
        if self.backend in ("wasm", "prime") and (paths or python):
            raise ConfigError(f"the sandbox backend {self.backend} has its own Python: remove `paths` and `python`")
        processors = 1 if self.backend == "prime" else len(os.sched_getaffinity(0))
        num_jails = num_jails or settings.num_jails or processors
        if self.backend == "wasm":
            start = build_wasm_start(self.limits, num_warm)
        elif self.backend == "prime":
            start = build_prime_start(
                self.limits,
                num_warm=num_warm,
                preload=preload,
                image=settings.remote_image,
                memory_bytes=settings.jail_memory_bytes or _REMOTE_MEMORY_BYTES,
            )
        else:
            start = build_start(
                isolated=self.backend == "bwrap",
                limits=self.limits,
                num_warm=num_warm,
                preload=preload,
                paths=paths,
                python=python,
                jail_memory_bytes=settings.jail_memory_bytes or _half_of_memory() // num_jails,
            )
        self._pool = JailPool(start, self.limits, num_jails, max_running or settings.max_running)

    async def __aenter__(self) -> Self:
        """Start the jails and try to escape from one.

        Raises:
            ConfigError: this host cannot isolate code, or the attempt succeeded. The message contains the fix.
        """
        if self.backend == "unsafe-subprocess":
            logger.warning(
                "sandbox: backend unsafe-subprocess isolates nothing: code that a model writes runs with the rights of "
                "this user and can read keys, delete files and use the network"
            )
        if self.backend == "wasm":
            await asyncio.to_thread(build_component)
        try:
            await self._pool.start()
        except JailStartError as error:
            if self.backend == "bwrap":
                raise JailStartError(explain_refusal(str(error))) from None
            raise JailStartError(f"the sandbox backend {self.backend} did not start: {error}") from None
        if self.backend != "unsafe-subprocess":
            try:
                await escape_test.check_isolation(self.run)
            except BaseException:
                await self._pool.close()
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all executions and sessions."""
        await self._pool.close()

    @property
    def limits_whole_jails(self) -> bool:
        """Whether a control group limits the memory of each jail."""
        return self._pool.limits_whole_jails

    @property
    def jail_pids(self) -> list[int]:
        """Process ids of the jails."""
        return self._pool.jail_pids

    async def run(
        self,
        code: str | None = None,
        *,
        argv: Sequence[str] = (),
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
        outputs: Sequence[str] = (),
        timeout: float | None = None,
    ) -> ExecutionResult:
        """Run Python code, or another program by its arguments, in a process that is used once.

        Args:
            files: relative name -> content, written to the working directory first.
            outputs: relative names of files to read back afterwards.
            timeout: seconds, None for `limits.timeout_seconds`.

        Returns:
            The result. Its verdict is `infra` if the sandbox failed three times: never score that.

        Raises:
            ValueError: both or none of code and argv, or a file that leads out of the working directory.
            ConfigError: another program, which the backend `wasm` cannot run.
        """
        request = ExecutionRequest(code, argv, stdin, files or {}, outputs, timeout)
        return await self.run_request(request)

    async def run_request(self, request: ExecutionRequest) -> ExecutionResult:
        """Run a request; as `run`."""
        check_request(request, self.limits)
        if request.argv and self.backend == "wasm":
            raise ConfigError(
                "the sandbox backend wasm runs Python code only; use the backend bwrap for other programs"
            )
        for attempt in range(_NUM_ATTEMPTS):
            result = await self._pool.run(request)
            if result.verdict is not Verdict.INFRA:
                break
            logger.warning("sandbox: attempt {} of {} failed: {}", attempt + 1, _NUM_ATTEMPTS, result.stderr)
        return result

    async def execute_code(
        self, code: str, test_cases: Sequence[TestCase], timeout_ms: float = 1000
    ) -> list[TestResult]:
        """Run code once per test case, all at once, and compare the outputs outside of the sandbox.

        Raises:
            SandboxError: the sandbox failed, so nothing is known about the code.
        """
        return await asyncio.gather(*(self._run_test(code, test, timeout_ms / 1000) for test in test_cases))

    async def _run_test(self, code: str, test: TestCase, seconds: float) -> TestResult:
        request = ExecutionRequest(code, stdin=test.input, timeout_seconds=seconds)
        if test.function is not None:
            request = replace(build_call(code, test), timeout_seconds=seconds)
        result = await self.run_request(request)
        if result.verdict is Verdict.INFRA:
            raise SandboxError(f"the sandbox failed {_NUM_ATTEMPTS} times: {result.stderr}")
        output: Any = result.stdout if test.function is None else None
        verdict, found = result.verdict, result.ok
        if test.function is not None and result.ok:
            try:
                output = read_call_result(result)
            except ValueError:
                verdict, found = Verdict.ERROR, False
        passed = found and is_equal(output, test.expected, test.compare)
        return TestResult(output, test.expected, passed, result.milliseconds, verdict, result.stderr)

    async def run_asserts(
        self, code: str, tests: str, functions: Sequence[str], *, setup: str = "", timeout_ms: float = 5000
    ) -> AssertResult:
        """Run assert-style tests in a second sandbox, which calls the functions of the code in the first one.

        Args:
            tests: statements with asserts that call the functions.
            functions: names of the functions of `code` that the tests call. Arguments and results are plain values.
            setup: code that the tests need, such as the definitions in a prompt.

        Raises:
            SandboxError: the sandbox failed, so nothing is known about the code.
        """
        json.dumps([code, tests, setup, *functions])  # a TypeError here rather than in the middle
        result = AssertResult(False, Verdict.INFRA)
        for _ in range(_NUM_ATTEMPTS):
            result = await run_asserts(
                self._pool, self.limits, code, tests, functions, setup=setup, timeout=timeout_ms / 1000
            )
            if result.verdict is not Verdict.INFRA:
                return result
        raise SandboxError(f"the sandbox failed {_NUM_ATTEMPTS} times: {result.error}")

    def session(self, answer: Answer | None = None) -> Session:
        """Return a session that keeps its state from cell to cell; `answer` handles its `host_call(text)`."""
        return Session(self._pool, self.limits, answer)


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
