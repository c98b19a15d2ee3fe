"""What happened to the processes of a run: a line an event, appended by `rl` alone, and a line for the user.

    {"time": unix s, "event": ..., "name": ..., "pid": ..., "role": ..., "code": ..., "detail": ...}

`name` is the heartbeat's where there is one (`trainer_0`), else the role's, or `role/pid` of any other descendant.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

Event = Literal[
    "started", "ended", "restarted", "silent", "stuck", "stopped", "traced", "resumed", "killed", "finished", "failed"
]


class Events:
    """Takes down what happens; a full disk takes nothing down, and does not end the run."""

    def __init__(self, file: Path | None, say: Callable[[str], None]) -> None:
        """Append to `file`.

        Args:
            file: `events.jsonl`; None writes none.
            say: shows the user a line.
        """
        self._file, self._say = file, say
        self._failed = False

    def add(
        self,
        event: Event,
        name: str,
        pid: int | None = None,
        *,
        role: str | None = None,
        code: int | None = None,
        detail: str | None = None,
        say: str | None = None,
    ) -> None:
        """Write an event; what is None is left out.

        Args:
            event: what happened.
            name: to whom.
            pid: its process id.
            role: of the run that it belongs to.
            code: exit code, minus the signal's number if a signal killed it.
            detail: the cause, as a sentence.
            say: a line for the user; None shows none.
        """
        if say is not None:
            self._say(say)
        if self._file is None:
            return
        fields = {"event": event, "name": name, "pid": pid, "role": role, "code": code, "detail": detail}
        line = json.dumps({"time": time.time(), **{key: value for key, value in fields.items() if value is not None}})
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            if not self._failed:
                self._say(f"warning: {self._file} cannot be written: {error.strerror}")
            self._failed = True
