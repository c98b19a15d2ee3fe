"""`Sandbox`: runs model-written code in milliseconds, and safely; at its start it tries to escape from itself.

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
import secrets
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from loguru import logger

from prime_rl_sandbox.comparison import is_equal, is_equal_value
from prime_rl_sandbox.execution import (
    BACKENDS,
    AssertResult,
    BackendName,
    ExecutionRequest,
    ExecutionResult,
    SandboxConfigError,
    SandboxError,
    SandboxLimits,
    TestCase,
    TestResult,
    Verdict,
    build_call,
    check_request,
    current_settings,
    read_call_result,
)
from prime_rl_sandbox.jail.bubblewrap import build_start, explain_refusal
from prime_rl_sandbox.jail.jail import JailStartError, PreloadError
from prime_rl_sandbox.jail.jail_pool import JailPool
from prime_rl_sandbox.prime_jail import build_prime_start
from prime_rl_sandbox.session import Answer, Session, run_asserts

DEFAULT_PRELOAD = (
    "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json",
    "math", "operator", "random", "re", "statistics", "string", "sys", "time", "typing",
)  # fmt: skip
_NUM_ATTEMPTS = 3
_MAX_DEFAULT_JAILS = 8
_REMOTE_MEMORY_BYTES = 4 * 2**30


class Sandbox:
    """A pool of isolated interpreters. Use it with `async with`; one instance serves any number of tasks of one loop.

    Backend, limits, num_jails, max_running, preload and paths that are None come from `current_settings`, the run's
    configuration.

    Args:
        backend: `bwrap` isolates by the kernel. `prime` uses remote machines. `unsafe-subprocess` isolates nothing, and
            logs a warning.
        limits: limits of each execution.
        num_jails: jails; one per processor and at most 8, or one remote machine, if neither this nor the settings say
            otherwise.
        num_warm: prepared processes per jail.
        max_running: executions at once in each jail; further ones wait.
        preload: modules that each execution finds imported already.
        paths: folders with further packages, readable in the sandbox and on its module path; not with `prime`.
        folders: absolute paths of further empty folders that each execution can write to, such as /app.
        python: the interpreter, None for this process's, or the system's if the user of the jail cannot read it; not
            with `prime`, which has its own.

    Raises:
        SandboxConfigError: what the backend needs is missing, or it does not have one of these options.
    """

    def __init__(
        self,
        backend: BackendName | None = None,
        *,
        limits: SandboxLimits | None = None,
        num_jails: int | None = None,
        num_warm: int = 8,
        max_running: int | None = None,
        preload: Sequence[str] | None = None,
        paths: Sequence[Path] | None = None,
        folders: Sequence[str] = (),
        python: Path | None = None,
    ) -> None:
        settings = current_settings()
        self.backend, self.limits = backend or settings.backend, limits or settings.limits
        if self.backend not in BACKENDS:
            raise SandboxConfigError(f"sandbox backend {self.backend!r} is unknown; use one of {', '.join(BACKENDS)}")
        paths = settings.paths if paths is None else paths
        preload = (*DEFAULT_PRELOAD, *settings.preload) if preload is None else preload
        if self.backend == "prime" and (paths or python):
            raise SandboxConfigError("the sandbox backend prime has its own Python: remove `paths` and `python`")
        processors = 1 if self.backend == "prime" else min(len(os.sched_getaffinity(0)), _MAX_DEFAULT_JAILS)
        num_jails = num_jails or settings.num_jails or processors
        if self.backend == "prime":
            start = build_prime_start(
                self.limits,
                num_warm=num_warm,
                preload=preload,
                folders=folders,
                image=settings.remote_image,
                memory_bytes=settings.jail_memory_bytes or _REMOTE_MEMORY_BYTES,
            )
        else:
            memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            start = build_start(
                isolated=self.backend == "bwrap",
                limits=self.limits,
                num_warm=num_warm,
                preload=preload,
                paths=paths,
                folders=folders,
                python=python,
                jail_memory_bytes=settings.jail_memory_bytes or memory_bytes // 2 // num_jails,
            )
        self._pool = JailPool(start, self.limits, num_jails, max_running or settings.max_running)

    async def __aenter__(self) -> Self:
        """Start the jails and try to escape from one.

        Raises:
            SandboxConfigError: this host cannot isolate code, or the attempt succeeded. The message contains the fix.
        """
        if self.backend == "unsafe-subprocess":
            logger.warning(
                "sandbox: backend unsafe-subprocess isolates nothing: code that a model writes runs with the rights of "
                "this user and can read keys, delete files and use the network"
            )
        try:
            await self._pool.start()
        except PreloadError:
            raise
        except JailStartError as error:
            if self.backend == "bwrap":
                raise JailStartError(explain_refusal(str(error))) from None
            raise JailStartError(f"the sandbox backend {self.backend} did not start: {error}") from None
        if self.backend != "unsafe-subprocess":
            try:
                await check_isolation(self.run)
            except BaseException:
                await self._pool.close()
                raise
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
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
        """
        request = ExecutionRequest(code, argv, stdin, files or {}, outputs, timeout)
        return await self.run_request(request)

    async def run_request(self, request: ExecutionRequest) -> ExecutionResult:
        """Run a request; as `run`."""
        check_request(request, self.limits)
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
            ValueError: a test compares the output with something else than text, so no program could pass it.
        """
        for test in test_cases:
            if test.function is None and not callable(test.compare) and not isinstance(test.expected, str):
                raise ValueError(
                    f"a test expects {test.expected!r} on stdout, which is text: use {str(test.expected)!r}"
                )
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
        passed = found and _passes(output, test)
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
        return Session(self._pool, self.limits, answer, self.backend != "unsafe-subprocess")


def _passes(output: Any, test: TestCase) -> bool:
    same = is_equal if test.function is None else is_equal_value
    if isinstance(test.compare, str):
        return same(output, test.expected, test.compare)
    try:
        return same(output, test.expected, test.compare)
    except Exception as error:  # noqa: BLE001 - the output is hostile: it must fail the test, not the reward function
        logger.warning("sandbox: the test fails, because its `compare` raised {}: {}", type(error).__name__, error)
        return False


_ESCAPE_ATTEMPTS = """
import ctypes, json, os, socket, sys
secret_path, port, host_pid, folder = json.loads(sys.stdin.read())
escaped = []
def attempt(name, function):
    try:
        if function() is not False:
            escaped.append(name)
    except (OSError, ValueError, KeyError):
        pass
def write(path):
    with open(path, "w") as file:
        file.write("x")
def inherited_descriptors():
    numbers = range(3, 5000)
    if os.path.isdir("/proc/self/fd"):
        numbers = map(int, os.listdir("/proc/self/fd"))
    found = set()
    for fd in numbers:
        try:
            os.fstat(fd)
            found.add(fd)
        except OSError:  # the one of the listing
            pass
    return len(found - {0, 1, 2}) > 0
def unshare():
    return ctypes.CDLL(None).unshare(0x10000000) == 0
def socket_of_virtual_machine():
    socket.socket(40, socket.SOCK_STREAM)
attempt("read a file of the host", lambda: open(secret_path).read())
attempt("write to a folder of the host", lambda: write(os.path.join(folder, "x")))
attempt("write to /dev", lambda: write("/dev/x"))
attempt("write to /usr", lambda: write("/usr/x"))
attempt("connect to the host", lambda: socket.create_connection(("127.0.0.1", port), 1))
attempt("open a vsock socket", socket_of_virtual_machine)
attempt("signal a process of the host", lambda: os.kill(host_pid, 0) if host_pid > 400 else False)
attempt("see processes of the host", lambda: len([x for x in os.listdir("/proc") if x.isdigit()]) > 1)
attempt("create a user namespace", unshare)
attempt("read the environment of the host", lambda: os.environ["PRIME_RL_SANDBOX_SECRET"])
attempt("use descriptors of the host", inherited_descriptors)
attempt("run as root", lambda: os.getuid() == 0)
print(json.dumps(escaped))
with open(f"/tmp/left_behind_{os.getuid()}", "w") as file:
    file.write("x")
"""


async def check_isolation(run: Callable[..., Awaitable[ExecutionResult]]) -> None:
    """Try to escape from a sandbox.

    Args:
        run: `Sandbox.run`.

    Raises:
        SandboxConfigError: an attempt succeeded, or the test could not be run.
    """
    escaped = await _attempt_escapes(run)
    second = await run('import os; print(os.path.exists(f"/tmp/left_behind_{os.getuid()}"))')
    if second.stdout.strip() != "False":
        escaped.append("see files of an earlier execution")
    if escaped:
        raise SandboxConfigError(
            f"the sandbox does not isolate code on this host, which could {', '.join(escaped)}; "
            "run `uv run doctor --sandbox` and report this"
        )


async def _attempt_escapes(run: Callable[..., Awaitable[ExecutionResult]]) -> list[str]:
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as server:
        folder = Path(name)
        folder.chmod(0o777)
        secret = folder / "secret"
        await asyncio.to_thread(secret.write_text, secrets.token_hex())
        secret.chmod(0o644)
        facts = [str(secret), server.getsockname()[1], os.getpid(), name]
        result = await run(_ESCAPE_ATTEMPTS, stdin=json.dumps(facts))
    if result.verdict is not Verdict.OK:
        raise SandboxConfigError(
            f"the self-test of the sandbox failed ({result.verdict}); run `uv run doctor --sandbox`: "
            f"{result.stderr.strip()[-300:]}"
        )
    return list(json.loads(result.stdout))
