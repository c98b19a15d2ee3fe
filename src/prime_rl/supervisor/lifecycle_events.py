"""`events.jsonl`: what happened to the processes of a run, one JSON object per event; only `rl` writes it."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

EventName = Literal[
    "started",
    "ended",
    "restarted",
    "silent",
    "stuck",
    "stopped",
    "traced",
    "resumed",
    "killed",
    "finished",
    "failed",
    "error",
]


class EventLog:
    """Shows lines to the user by `print`, and appends events to a file. A write error is reported once."""

    def __init__(self, file: Path | None, print: Callable[[str], None]) -> None:
        self._file, self.print = file, print
        self._write_failed = False

    def add(
        self,
        event: EventName,
        name: str,
        pid: int | None = None,
        *,
        role: str | None = None,
        code: int | None = None,
        detail: str | None = None,
        message: str | None = None,
    ) -> None:
        """Write an event; fields that are None are omitted.

        Args:
            name: of the process: its heartbeat's (`trainer_0`), else its role, or `role/pid` of another descendant.
            code: exit code, minus the signal's number if a signal killed it.
            detail: the cause, as a sentence.
            message: a line for the user; None shows none.
        """
        if message is not None:
            self.print(message)
        if self._file is None:
            return
        fields = {"event": event, "name": name, "pid": pid, "role": role, "code": code, "detail": detail}
        line = json.dumps({"time": time.time(), **{key: value for key, value in fields.items() if value is not None}})
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            if not self._write_failed:
                self.print(f"warning: {self._file} cannot be written: {error.strerror}")
            self._write_failed = True
