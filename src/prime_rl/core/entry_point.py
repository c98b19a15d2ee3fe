"""The wrapper of every command: exit codes, one-line errors, and the file that reports an error to `rl`."""

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path

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


@contextmanager
def exit_with_reader() -> Iterator[None]:
    """Exit silently if the reader of stdout exits (`--help | head`). Restores the SIGPIPE handler afterwards.

    With the default handler, a lost network connection would end the process as well.
    """
    previous = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
        sys.stdout.flush()
    finally:
        signal.signal(signal.SIGPIPE, previous)


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
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        from prime_rl.core.logs.log_file import append_to_log_file  # only a failed command needs it

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
