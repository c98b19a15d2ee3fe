"""Writes the finished phases of this process to `timeline/<process>.jsonl`, from which a page draws its lane.

Training never waits for it: phases go to a bounded queue that one daemon thread writes once a second. Phases that the
queue or the disk cannot take are dropped, counted, and marked in the file by a line named `dropped`.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from loguru import logger

from prime_rl.core.os_errors import summarize_os_error
from prime_rl.storage.paths import RunPaths

DROPPED = "dropped"
"""Name of a line that stands for phases which were not written; `count` is their number."""
MIN_SECONDS = 0.001
"""Shorter phases are left out."""
_MAX_QUEUED = 4096
_MAX_BYTES = 32 * 2**20
_CLOSE_SECONDS = 5.0


class TimelineWriter:
    """Appends one line per phase to the timeline of process `name`, the name of its heartbeat. Thread-safe.

    The file is opened for each write, so it may be removed at any time. At `max_bytes` it is renamed to
    `<process>.jsonl.1`, which replaces an older one.
    """

    def __init__(
        self,
        paths: RunPaths,
        name: str,
        interval_seconds: float = 1.0,
        max_queued: int = _MAX_QUEUED,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        """Write nothing yet; the thread starts with the first phase."""
        self._path = paths.timeline(name)
        self._interval_seconds, self._max_queued, self._max_bytes = interval_seconds, max_queued, max_bytes
        self._pid = os.getpid()
        self._queue: list[dict[str, Any]] = []
        self._unmarked: list[dict[str, Any]] = []
        """Dropped phases as one line, until it is in the file."""
        self._num_dropped = 0
        self._warned = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def num_dropped(self) -> int:
        """Number of phases that were not written."""
        return self._num_dropped

    def add(
        self,
        name: str,
        start: float,
        end: float,
        *,
        waiting_for: str | None = None,
        step: int | None = None,
        version: int | None = None,
        **counters: float,
    ) -> None:
        """Queue a finished phase; returns at once.

        Args:
            name: what the process did, such as "wait for batch", without a number.
            start: Unix seconds.
            end: Unix seconds; a phase shorter than `MIN_SECONDS` is left out.
            waiting_for: role that the process waited for.
            step: the step that the phase belongs to.
            version: the policy version that the phase belongs to.
            counters: further keys of the line, such as `busy`.
        """
        if end - start < MIN_SECONDS or os.getpid() != self._pid:  # a forked child has no thread
            return
        phase = {
            "name": name, "start": start, "end": end, "waiting_for": waiting_for, "step": step, "version": version,
            **counters,
        }  # fmt: skip
        with self._lock:
            if self._closed.is_set():
                return
            if len(self._queue) >= self._max_queued:
                self._drop([phase])
                return
            self._queue.append(phase)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)
                self._thread.start()

    @contextmanager
    def phase(self, name: str, step: int | None = None, version: int | None = None) -> Iterator[None]:
        """Add the block as a phase, also if it raises."""
        start = time.time()
        try:
            yield
        finally:
            self.add(name, start, time.time(), step=step, version=version)

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Write the queued phases, for at most `timeout_seconds` seconds; later phases are ignored."""
        with self._lock:
            self._closed.set()
        if self._thread is not None and os.getpid() == self._pid:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while not self._closed.wait(self._interval_seconds):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            phases, self._queue = self._queue, []
            marks, self._unmarked = self._unmarked, []
        if not phases and not marks:
            return
        lines = "".join(json.dumps(phase) + "\n" for phase in (*marks, *phases))
        try:
            _append(self._path, lines.encode(), self._max_bytes)
            self._warned = False
        except OSError as error:
            with self._lock:
                self._unmarked = marks + self._unmarked
                self._drop(phases)
            if not self._warned:
                logger.warning("timeline: phases are not recorded: {}", summarize_os_error(error, self._path))
                self._warned = True

    def _drop(self, phases: list[dict[str, Any]]) -> None:
        """Count phases as dropped, in one line for all since the last write."""
        if not phases:
            return
        self._num_dropped += len(phases)
        whole = [*self._unmarked, *phases]
        count = sum(phase.get("count", 1) for phase in self._unmarked) + len(phases)
        start, end = min(phase["start"] for phase in whole), max(phase["end"] for phase in whole)
        empty = {"waiting_for": None, "step": None, "version": None}
        self._unmarked = [{"name": DROPPED, "start": start, "end": end, **empty, "count": count}]


def _append(path: Path, data: bytes, max_bytes: int) -> None:
    """Append complete lines, or nothing; a line that a killed process left incomplete is removed first."""
    path.parent.mkdir(exist_ok=True)  # without parents, as a heartbeat
    with suppress(FileNotFoundError):
        if path.stat().st_size + len(data) > max_bytes:
            path.replace(path.with_name(f"{path.name}.1"))
    with path.open("a+b", buffering=0) as file:
        size = _complete_size(file.seek(0, os.SEEK_END), path)
        file.truncate(size)
        written = 0
        try:
            while written < len(data):  # a nearly full disk accepts a part; the next write raises the reason
                written += file.write(data[written:])
        except OSError:
            file.truncate(size)
            raise


def _complete_size(size: int, path: Path) -> int:
    """Return the number of bytes up to the end of the last complete line."""
    with path.open("rb") as file:
        start = size
        while start:
            start, end = max(0, start - 4096), start
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                return start + found + 1
    return 0
