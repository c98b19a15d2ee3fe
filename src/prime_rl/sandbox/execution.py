"""What a sandbox runs and returns: limits, requests, results, test cases."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any

from prime_rl.core.errors import RunError

MIB = 2**20


class SandboxError(RunError):
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
    check_files(request.files, limits)
    for name in request.outputs:
        check_file_name(name)


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
