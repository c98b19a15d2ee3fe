"""The two errors that users meet, and the one-line summary of any other exception."""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class ConfigError(Exception):
    """Invalid input. The message is one line: the problem, its source and the fix. Exit code 2."""


class RunError(Exception):
    """A run cannot continue: a wait timed out, a peer died, a request was rejected. Exit code 1."""


@contextmanager
def translate_error(
    kinds: type[Exception] | tuple[type[Exception], ...], make: Callable[[Any], Exception]
) -> Iterator[None]:
    """Raise `make(error)` instead of an exception of one of these types, without the original traceback."""
    try:
        yield
    except kinds as error:
        raise make(error) from None


def unwritable(problem: str, fix: str = "set --output-dir to a writable folder") -> Callable[[OSError], ConfigError]:
    """Return what `translate_error` raises for an OSError: `{problem}: {reason}; {fix}`."""
    return lambda error: ConfigError(f"{problem}: {error.strerror}; {fix}")


_CREDENTIALS = re.compile(r"(\w://)[^/?#@\s]+@")
"""User and password in a URL."""


def summarize_exception(error: BaseException, *, full: bool = False, location: bool = False) -> str:
    """Return the type and the message of an exception on one line, without passwords in URLs.

    Args:
        error: the exception.
        full: use the whole message, up to 300 characters, and add the exceptions in its `__cause__` chain that it does
            not quote. By default only the first line is used, because libraries append stack traces and advice.
        location: add the file and line that raised it.
    """
    text = _CREDENTIALS.sub(r"\1***@", str(error))
    lines = [stripped for line in text.splitlines() if (stripped := " ".join(line.split()))]
    if full:
        message = " ".join(lines)[:300]
    else:
        message = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    summary = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if full and error.__cause__ is not None and " ".join(str(error.__cause__).split()) not in message:
        summary = f"{summary} (from {summarize_exception(error.__cause__, full=True)})"[:1000]
    frames = traceback.extract_tb(error.__traceback__)[-1:] if location else ()
    if frames and not frames[-1].filename.startswith("<frozen"):  # Python's own, of a module that is not there
        summary += f" ({frames[-1].filename}:{frames[-1].lineno})"
    return summary


def first_exception(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception of a group that may contain other groups."""
    error = group.exceptions[0]
    return first_exception(error) if isinstance(error, BaseExceptionGroup) else error
