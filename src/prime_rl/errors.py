"""The two errors that users meet, and how an entry point turns them into exit codes."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from prime_rl.plain import visible

ERROR_FILE = "PRIME_RL_ERROR_FILE"
"""Environment variable: where an entry point leaves its error for `rl`, as {"code": exit code, "message": one line}."""


class ConfigError(Exception):
    """Bad input. The message is one line: what is wrong, where, and how to mend it. Exit code 2."""


class RunError(Exception):
    """A run that cannot go on: a wait past its deadline, a dead peer, a refused request. Exit code 1."""


def first_line(error: BaseException) -> str:
    """What an exception of a library says, in one line: its first, and the next where that ends in a colon."""
    first, *others = (line.strip() for line in str(error).strip().split("\n"))
    if first.endswith(":") and others:
        first += f" {others[0]}"
    return f"{type(error).__name__}: {first}" if isinstance(error, KeyError) or not first else first


def run_main(main: Callable[[], None]) -> None:
    """Run an entry point; report `ConfigError` and `RunError` as one line without a traceback.

    Exits 2 for bad input, 1 for a run that failed or that the machine refused something, 130 after Ctrl-C; any other
    exception keeps its traceback, since it is a defect of ours and not of the input. Under `rl`, the first error of a
    process is also left in `ERROR_FILE`: torchrun would hide the exit code of its workers.
    """
    try:
        main()
    except ConfigError as error:
        sys.exit(_report(error, 2))
    except RunError as error:
        sys.exit(_report(error, 1))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        from prime_rl.run.surroundings import describe, is_surroundings  # which needs the errors of this module

        if not is_surroundings(error):
            _record(f"{type(error).__name__}: {error}", 1)
            raise
        sys.exit(_report(RunError(describe(error)), 1))
    except Exception as error:
        _record(f"{type(error).__name__}: {error}", 1)
        raise


def _report(error: Exception, code: int) -> int:
    print(f"error: {visible(str(error))}", file=sys.stderr, flush=True)
    _record(str(error), code)
    return code


def record_cause(message: str, code: int) -> None:
    """Leave the error that was behind all others for `rl`, in place of what they have left."""
    if (path := os.environ.get(ERROR_FILE)) is not None:
        with suppress(OSError):
            Path(path).unlink(missing_ok=True)
        _record(message, code)


def _record(message: str, code: int) -> None:
    path, attempt = os.environ.get(ERROR_FILE), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if path is None:
        return
    file = Path(path)
    # The first error is the cause, so it is never overwritten, but by a later attempt of torchrun; on a full disk the
    # log has to do.
    with suppress(OSError, ValueError):
        if file.exists() and json.loads(file.read_text()).get("attempt", attempt) != attempt:
            file.unlink()
        with file.open("x") as new:
            json.dump({"code": code, "message": " ".join(message.split()), "attempt": attempt}, new)
