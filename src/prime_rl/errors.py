"""The two errors that users meet, and how an entry point turns them into exit codes."""

import sys
from collections.abc import Callable


class ConfigError(Exception):
    """Bad input. The message is one line: what is wrong, where, and how to mend it. Exit code 2."""


class RunError(Exception):
    """A run that cannot go on: a wait past its deadline, a dead peer, a refused request. Exit code 1."""


def run_main(main: Callable[[], None]) -> None:
    """Run an entry point; report `ConfigError` and `RunError` as one line without a traceback.

    Exits 2 for bad input, 1 for a run that failed, 130 after Ctrl-C; any other exception keeps its traceback, since
    it is a defect of ours and not of the input.
    """
    try:
        main()
    except ConfigError as error:
        sys.exit(_report(error, 2))
    except RunError as error:
        sys.exit(_report(error, 1))
    except KeyboardInterrupt:
        sys.exit(130)


def _report(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return code
