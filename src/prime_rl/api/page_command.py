"""Serves the page of a run from a child process."""

import time

from prime_rl.api.child_command import ChildCommand
from prime_rl.core.errors import RunError
from prime_rl.core.loopback import answers
from prime_rl.core.ports import check_port, find_free_port
from prime_rl.storage.paths import RunPaths

_HOST = "127.0.0.1"
_START_SECONDS = 60.0


def start_page(paths: RunPaths, port: int) -> tuple[ChildCommand, str]:
    """Start `page` for a run directory, on any free port if `port` is 0; return the process and its address.

    Raises:
        ConfigError: the port is in use.
        RunError: it does not start.
    """
    port = port or find_free_port()
    check_port(_HOST, port, "page(port)")
    url = f"http://{_HOST}:{port}"
    page = ChildCommand("page", [str(paths.root), "--port", str(port)], paths)
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and page.exit_code is None:
        if answers(url):
            return page, url
        time.sleep(0.1)
    page.check()
    page.stop()
    raise RunError(f"the page did not start; log {page.log}")
