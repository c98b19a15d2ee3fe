"""I7 no hang: the writing half of a heartbeat (`prime_rl.run.heartbeat` is the reading one).

A thread of its own writes it, so that it goes on while the process computes, and costs it nothing.
"""

import json
import os
import socket
import threading
import time
from asyncio import AbstractEventLoop
from contextlib import suppress
from types import TracebackType
from typing import Self

from prime_rl.run.heartbeat import ENDED, FAILED, FORMAT, boot_id, own_log, process_state
from prime_rl.run.paths import RunPaths

INTERVAL_S = 1.0
"""Between two beats."""


class Heartbeat:
    """Writes the heartbeat of this process, in a thread of its own, from `start` to `close`.

    As a context manager it starts, and closes as `ended`, or as `failed` where an exception passes. Any thread may call
    `enter` and `advance`; neither touches the disk.

    Args:
        paths: of the run.
        name: of the process, and of its file.
        role: `trainer`, `orchestrator` or `inference`.
        interval_s: between two beats.
    """

    def __init__(self, paths: RunPaths, name: str, role: str, interval_s: float = INTERVAL_S) -> None:
        self._path = paths.heartbeat(name)
        self._interval_s = interval_s
        self._who = {"name": name, "role": role, "pid": os.getpid(), "host": socket.gethostname()}
        self._where = {"boot_id": boot_id(), "started": process_state(os.getpid())[1], "log": own_log()}
        self._phase: tuple[str, float | None, str | None, float] = ("start", None, None, time.time())
        self._progress = self._beats = 0
        self._loop: AbstractEventLoop | None = None
        self._turned = threading.Event()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Say the first word, and go on by itself.

        A heartbeat that cannot be written (full disk, directory gone) ends nothing: its readers will tell.
        """
        self._write()
        self._thread.start()

    def enter(self, phase: str, deadline_s: float | None = None, waiting_for: str | None = None) -> None:
        """Say what this process does from now on; that is progress, too. The same phase again changes nothing.

        Args:
            phase: for people, such as "wait for batch 12".
            deadline_s: without progress for longer than this it counts as stuck.
            waiting_for: the role that it waits for.
        """
        with self._lock:
            if self._phase[:3] != (phase, deadline_s, waiting_for):
                self._phase = phase, deadline_s, waiting_for, time.time()
                self._progress += 1

    def advance(self, units: int = 1) -> None:
        """Count work that is done."""
        with self._lock:
            self._progress += units

    def follow(self, loop: AbstractEventLoop | None) -> None:
        """Beat only while `loop` turns, so that one that is blocked falls silent; None follows none again."""
        self._turned.set()
        self._loop = loop

    def close(self, last: str = ENDED) -> None:
        """Say the last word: `ended` or `failed`. What is called later says nothing."""
        if self._closed.is_set() or os.getpid() != self._who["pid"]:  # a forked child has no word in this
            return
        self._closed.set()
        self.follow(None)
        if self._thread.is_alive():
            self._thread.join(10 * self._interval_s)
        self.enter(last)
        self._write()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Whoever is told to stop (Ctrl-C, SystemExit, a cancellation) ends in order."""
        self.close(FAILED if isinstance(error, Exception) else ENDED)

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            if self._turns():
                self._write()

    def _turns(self) -> bool:
        """Whether the loop has turned since it was asked last; asks again."""
        loop, turned = self._loop, self._turned.is_set()
        if loop is not None and turned:
            self._turned.clear()
            with suppress(RuntimeError):  # the loop is closed: silent until it is followed no more
                loop.call_soon_threadsafe(self._turned.set)
        return loop is None or turned

    def _write(self) -> None:
        with self._lock:
            self._beats += 1
            phase, deadline_s, waiting_for, since = self._phase
            told = {"beat": self._beats, "phase": phase, "progress": self._progress, "phase_deadline_s": deadline_s}
        told |= {"phase_since": since, "waiting_for": waiting_for, "written": time.time()}
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"format": FORMAT, **self._who, **self._where, **told}))
            temporary.replace(self._path)
        except OSError:  # a full disk must not make the living look dead: a touch needs no room
            with suppress(OSError):
                os.utime(self._path)
