"""One start at a time writes a run directory: a start that resumes the run ends the processes of an earlier one (I3).

A scheduler may start a job again while processes of its first start are still running, on a node that it cannot reach.
They would write the same batches, versions and checkpoints. Starts have names (`START_VARIABLE`), and the one that
resumes writes its name to a file (`take_over`), before it touches anything else. The heartbeat thread of each process
looks at the file (`RunTakeover`). Processes without a name, which a user has started, do not take part: they lock
the directory (`hold_role_lock`).
"""

import os
import sys
import time

from prime_rl.core.entry_point import write_error_file
from prime_rl.core.logs import append_to_log_file
from prime_rl.storage.artifact import replace_file
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import START_VARIABLE

TAKEOVER_SECONDS = 5.0
"""Time in which processes of an earlier start notice a takeover: the longest interval of heartbeats and two seconds."""


def take_over(paths: RunPaths) -> None:
    """Record that the run belongs to the start of this process, and wait until earlier ones have ended.

    Without a name of the start it does nothing.
    """
    if name := os.environ.get(START_VARIABLE):
        replace_file(paths.owner, name)
        time.sleep(TAKEOVER_SECONDS)  # a process that cannot be reached cannot confirm its end


class RunTakeover:
    """Detects that another start has taken over the run since this object was created."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths, self._start = paths, os.environ.get(START_VARIABLE)
        self._owner = self._read()

    def new_owner(self) -> str | None:
        """Return the name of the start that has taken over the run; None if there is none."""
        owner = self._read()
        return owner if self._start and owner not in (None, self._owner, self._start) else None

    def exit_if_taken(self) -> None:
        """End this process at once if another start has taken over: its next write could already do damage."""
        if (owner := self.new_owner()) is None:
            return
        message = f"{self._paths.root} was taken over by start {owner}; this process (start {self._start}) exits"
        print(f"error: {message}", file=sys.stderr, flush=True)
        append_to_log_file(f"error: {message}")
        write_error_file(message, 2)
        os._exit(2)

    def _read(self) -> str | None:
        try:
            return self._paths.owner.read_text()
        except OSError:  # also of a file system that does not answer for a moment
            return None
