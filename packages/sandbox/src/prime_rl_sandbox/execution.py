"""What a sandbox runs and returns: limits, requests, results, test cases, the call of a tested function, settings."""

import base64
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from prime_rl_sandbox import plain_values

MIB = 2**20
_RESULT_FILE = ".function_result"
_CALL = """
def _call_function():
    import base64, json, os, sys
    codec = {"__name__": "plain_values"}
    exec(base64.b64decode("__CODEC__"), codec)
    call = codec["decode_value"](json.loads(base64.b64decode("__CALL__")))
    value = globals()[call["function"]](*call["args"], **call["kwargs"])
    try:
        text = json.dumps(codec["encode_value"](value))
    except TypeError:
        text = json.dumps(codec["encode_value"](list(value)))
    with open(".function_result", "w") as file:
        file.write(text)
_call_function()
"""
BackendName = Literal["bwrap", "prime", "unsafe-subprocess"]
BACKENDS: tuple[str, ...] = get_args(BackendName)
_HIDDEN_FOLDERS = ("/tmp", "/proc", "/dev", "/jail")


class SandboxConfigError(Exception):
    """A sandbox cannot run here, or not as configured. The message is one line: the problem, its source and the fix."""


class SandboxError(Exception):
    """The sandbox failed several times in a row, so nothing is known about the code: no reason for a reward of 0."""


class Verdict(StrEnum):
    """How an execution ended."""

    OK = "ok"
    ERROR = "error"
    """The exit code is not 0."""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT = "output"
    """It wrote more than `SandboxLimits.output_bytes`."""
    INFRA = "infra"
    """The sandbox failed, not the code: retry, and never score it."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of each execution.

    Attributes:
        timeout_seconds: wall-clock time, without the time in which the code waited for a free processor.
        max_timeout_factor: the limit of the wall-clock time with that waiting time, as a multiple of the timeout.
        memory_bytes: address space of each process.
        limits_address_space: without it, a control group limits the memory of all processes together to `memory_bytes`,
            where groups are available: some programs, such as Node.js, reserve much more than they use.
        num_processes: processes and threads.
        output_bytes: stdout and stderr together, and each file that is read back.
        disk_bytes: files in the working directory, which is in memory.
        num_files: of the working directory.
    """

    timeout_seconds: float = 5.0
    max_timeout_factor: float = 8.0
    memory_bytes: int = 512 * MIB
    num_processes: int = 32
    output_bytes: int = MIB
    disk_bytes: int = 16 * MIB
    num_files: int = 4096
    num_open_files: int = 256
    shared_memory_bytes: int = MIB
    limits_address_space: bool = True


@dataclass(frozen=True, slots=True)
class ExecutionRequest:
    """A program: Python code, or the arguments of another program."""

    code: str | None = None
    argv: Sequence[str] = ()
    stdin: str = ""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    timeout_seconds: float | None = None
    module_name: str = "__main__"


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """What a program did.

    Attributes:
        exit_code: negative for a signal; None if the sandbox failed.
        stdout: text; a byte that is not UTF-8 becomes a surrogate (`printable`).
        stderr: the same.
        milliseconds: from the start of the code to its end.
        files: contents of the requested `outputs` that exist.
        value: `repr` of the last expression of a session cell.
    """

    verdict: Verdict
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    milliseconds: float = 0.0
    files: Mapping[str, bytes] = field(default_factory=dict)
    value: str | None = None

    @property
    def printable(self) -> "ExecutionResult":
        """The result with texts that can be encoded: what is not UTF-8 becomes question marks."""
        value = None if self.value is None else _to_printable(self.value)
        return replace(self, stdout=_to_printable(self.stdout), stderr=_to_printable(self.stderr), value=value)

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself with exit code 0."""
        return self.verdict is Verdict.OK


@dataclass(frozen=True, slots=True)
class TestCase:
    """One input and the expected output, which never enters the sandbox.

    Attributes:
        input: text on stdin, if `function` is None.
        expected: text on stdout, or the value that the function returns.
        function: name of the function that is called with `args` and `kwargs`.
        compare: "exact", "tolerance", or a function (output, expected) -> bool that runs outside of the sandbox.
    """

    __test__ = False  # not a test class of pytest

    input: str = ""
    expected: Any = ""
    function: str | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    compare: str | Callable[[Any, Any], bool] = "exact"


@dataclass(frozen=True, slots=True)
class TestResult:
    """The outcome of one test case; `output` is None if there is none."""

    __test__ = False

    output: Any
    expected: Any
    passed: bool
    latency_ms: float
    verdict: Verdict = Verdict.OK
    stderr: str = ""


@dataclass(frozen=True, slots=True)
class AssertResult:
    """The outcome of assert-style tests: `error` is the first failure, "" if they passed."""

    passed: bool
    verdict: Verdict
    error: str = ""
    latency_ms: float = 0.0


def _to_printable(text: str) -> str:
    return text.encode(errors="replace").decode()


def check_request(request: ExecutionRequest, limits: SandboxLimits) -> None:
    """Raise a ValueError for a request that no sandbox could run."""
    if (request.code is None) == (not request.argv):
        raise ValueError("pass either code or argv")
    if any("\0" in argument for argument in request.argv):
        raise ValueError("an argument contains a null character")
    if not isinstance(request.stdin, str):
        raise ValueError(f"stdin is text, and not of type {type(request.stdin).__name__}")
    check_timeout(request.timeout_seconds)
    check_files(request.files, limits)
    for name in request.outputs:
        check_file_name(name)


def check_timeout(seconds: float | None) -> None:
    """Raise a ValueError for a timeout that is not positive, or not finite."""
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ValueError(f"the timeout is {seconds} seconds; it must be positive and finite")


def check_files(files: Mapping[str, str | bytes], limits: SandboxLimits) -> None:
    """Raise a ValueError for files that do not fit into the working directory, or whose names lead out of it."""
    for name in files:
        check_file_name(name)
    size = sum(len(content.encode() if isinstance(content, str) else content) for content in files.values())
    if size > limits.disk_bytes // 2:
        raise ValueError(f"the files have {size} bytes; at most half of disk_bytes = {limits.disk_bytes} is possible")


def check_file_name(name: str) -> None:
    """Raise a ValueError for a name that is absolute or leads out of the working directory."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts:
        raise ValueError(f"file name {name!r} leads out of the working directory")
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise ValueError(f"file name {name!r} contains half of a surrogate pair")


def build_call(code: str, test: TestCase) -> ExecutionRequest:
    """Return the request that defines the code's functions and calls the one of the test."""
    call = {"function": test.function, "args": list(test.args), "kwargs": dict(test.kwargs)}
    encoded = base64.b64encode(json.dumps(plain_values.encode_value(call)).encode()).decode()
    codec = base64.b64encode(inspect.getsource(plain_values).encode()).decode()
    program = code + "\n" + _CALL.replace("__CODEC__", codec).replace("__CALL__", encoded)
    return ExecutionRequest(program, outputs=[_RESULT_FILE], module_name="solution")


def read_call_result(result: ExecutionResult) -> Any:
    """Return the value of the function.

    Raises:
        ValueError: it returned no plain value, or the program ended before the call.
    """
    if _RESULT_FILE not in result.files:
        raise ValueError("the function did not return")
    try:
        return plain_values.decode_value(json.loads(result.files[_RESULT_FILE]))
    except (TypeError, OverflowError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"the function did not return a plain value: {error}") from None


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """How this process runs code that a model writes: what a `Sandbox` uses unless it is constructed with other values.

    A worker sets it from the run's configuration.

    Attributes:
        backend: see `Sandbox`.
        limits: of each execution.
        num_jails: jails, None for one per processor and at most 8.
        max_running: executions at once in each jail.
        jail_memory_bytes: memory of each jail, where control groups are available, and of each remote machine; None is
            half of this machine's, divided by the number of jails, and 4 GiB of a remote one.
        command_timeout_seconds: time of each command of an agent.
        preload: modules that each execution finds imported already, besides `DEFAULT_PRELOAD`.
        paths: folders with further packages.
        remote_image: container image of the remote machines of the backend `prime`; it has `python3`.
    """

    backend: BackendName = "bwrap"
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    num_jails: int | None = None
    max_running: int = 128
    jail_memory_bytes: int | None = None
    command_timeout_seconds: float = 60.0
    preload: tuple[str, ...] = ()
    paths: tuple[Path, ...] = ()
    remote_image: str = "python:3.12-slim"


def check_paths(paths: Iterable[Path]) -> None:
    """Check that folders can be shown to model-written code.

    Raises:
        SandboxConfigError: one is a part of the file system that the sandbox has itself.
    """
    for path in paths:
        hidden = next((name for name in _HIDDEN_FOLDERS if path.is_relative_to(name) or path == Path("/")), None)
        if hidden is not None or not path.is_absolute():
            reason = (
                "is not an absolute path"
                if hidden is None
                else f"would hide, or be hidden by, the sandbox's own {hidden}"
            )
            raise SandboxConfigError(f"sandbox.paths: {path} {reason}; use another folder, such as /opt/packages")


_current = SandboxSettings()


def current_settings() -> SandboxSettings:
    """Return the settings of this process."""
    return _current


def use_settings(settings: SandboxSettings) -> None:
    """Set the settings for sandboxes that this process constructs from now on."""
    global _current
    _current = settings
