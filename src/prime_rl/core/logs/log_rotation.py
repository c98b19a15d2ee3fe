"""Rotates log files to which other processes write by their stdout and stderr: those under `rl`, and environments."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prime_rl.core.logs import log_file

_INTERVAL_SECONDS = 10.0


@contextmanager
def rotating_logs(folder: Path) -> Iterator[None]:
    """Rotate the log files in `folder`, except those that their processes rotate, while the block runs.

    The processes must append (O_APPEND), because they keep their files open.
    """
    ended = threading.Event()

    def rotate_at_intervals() -> None:
        while not ended.wait(_INTERVAL_SECONDS):
            rotate_large_logs(folder)

    thread = threading.Thread(target=rotate_at_intervals, name="log-rotation", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_INTERVAL_SECONDS)


def rotate_large_logs(folder: Path) -> None:
    """Copy each file of more than `MAX_BYTES` to `NAME.log.1`, and empty it. A line in between may be lost."""
    for file in folder.glob("*.log"):
        with suppress(OSError):  # it is deleted, or the disk is full: later
            if file.stat().st_size > log_file.MAX_BYTES and str(file) != log_file.log_path():
                part = file.with_name(f"{file.name}.part")
                try:
                    shutil.copyfile(file, part)
                    part.replace(file.with_name(f"{file.name}.1"))
                    os.truncate(file, 0)
                finally:
                    part.unlink(missing_ok=True)
