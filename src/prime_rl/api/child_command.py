"""Starts a command as a child of the calling program, and turns its error into an exception."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from prime_rl.core.entry_point import ERROR_FILE, read_error_file
from prime_rl.core.errors import ConfigError, RunError, translate_error
from prime_rl.core.os_errors import signal_name
from prime_rl.storage.paths import RunPaths


class ChildCommand:
    """A command in its own session: Ctrl-C reaches only the calling program, and the command ends with the program.

    Attributes:
        log: the file that gets the output of the command.
    """

    def __init__(self, command: str, arguments: Sequence[str], paths: RunPaths) -> None:
        """Start `command`, a command of prime-rl or a module with a `main`.

        Raises:
            ConfigError: the run directory cannot be written.
        """
        self.command = command
        name = command.rpartition(".")[2]
        self.log, self._error = paths.log(name), paths.error(name)
        unwritable = f"cannot write {self.log}"
        with translate_error(OSError, lambda error: ConfigError(f"{unwritable}: {error.strerror}; set output_dir")):
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self._error.unlink(missing_ok=True)
            log = self.log.open("ab")
        with log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prime_rl.api.child_main", str(os.getpid()), command, *arguments],
                env={**os.environ, ERROR_FILE: str(self._error), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the command."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, minus the signal's number if one killed it; None while it runs."""
        return self._process.poll()

    def check(self) -> None:
        """Raise the error of a command that has failed: ConfigError for bad input, else RunError."""
        code = self.exit_code
        if not code:
            return
        error = read_error_file(self._error)
        if error is None:
            what = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
            raise RunError(f"{self.command} {what}; log {self.log}")
        if error.code == 2:
            raise ConfigError(error.message)
        raise RunError(f"{error.message}; log {self.log}" if "log " not in error.message else error.message)

    def wait(self) -> None:
        """Wait for the end, and raise its error. Stops the command if this program is interrupted."""
        try:
            self._process.wait()
        except BaseException:
            self.stop()
            raise
        self.check()

    def stop(self) -> None:
        """Send SIGTERM and wait until all its processes have ended; another Ctrl-C skips their time limit."""
        self._terminate()
        try:
            self._process.wait()
        except KeyboardInterrupt:
            self._terminate()
            self._process.wait()
            raise

    def _terminate(self) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
