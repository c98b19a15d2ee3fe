"""One run at a time in a run directory."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from prime_rl.errors import ConfigError
from prime_rl.run.paths import RunPaths


@contextmanager
def hold_lock(paths: RunPaths) -> Iterator[None]:
    """Hold the lock of a run directory, making the directory if needed. The kernel frees it however we end.

    Raises:
        ConfigError: another run holds it, or the directory cannot be written.
    """
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
        file = paths.lock.open("a+")
    except OSError as error:
        raise ConfigError(f"output_dir = {paths.root} cannot be written: {error.strerror}; set --output-dir") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise ConfigError(
                f"output_dir = {paths.root} belongs to a run that is going on (process {owner}); "
                "choose another with --exp-id or --output-dir"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
