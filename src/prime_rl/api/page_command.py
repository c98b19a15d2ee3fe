"""Serves the page of a run from a child process."""

import re
import time

from prime_rl.api.child_command import ChildCommand
from prime_rl.core.errors import RunError
from prime_rl.storage.paths import RunPaths

_START_SECONDS = 60.0


def start_page(paths: RunPaths, port: int) -> tuple[ChildCommand, str]:
    """Start `page` for a run directory; return the process and its address.

    Raises:
        ConfigError: the port is in use.
        RunError: it does not start.
    """
    log = paths.log("page")
    known = log.stat().st_size if log.exists() else 0
    page = ChildCommand("page", [str(paths.root), "--port", str(port)], paths)
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        page.check()
        if found := re.search(rb"page: (http://\S+)", log.read_bytes()[known:]):
            return page, found[1].decode()
        time.sleep(0.1)
    page.stop()
    raise RunError(f"the page did not start; log {log}")
