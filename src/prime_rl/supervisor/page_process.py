"""The page of a run (`rl --page`) in a process of its own, whose end does not affect the run."""

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from subprocess import DEVNULL, STDOUT

from prime_rl.configs.rl import PageConfig
from prime_rl.core.entry_point import ERROR_FILE
from prime_rl.core.ports import find_free_port
from prime_rl.liveness.parent_process import with_parent_death_signal
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.child_processes import describe_exit

_STOP_SECONDS = 3.0
"""After SIGTERM, before SIGKILL."""
_KILL_SECONDS = 3.0
"""After SIGKILL: a file system that hangs must not hold up the run's end."""


async def serve_page(config: PageConfig, paths: RunPaths, show: Callable[[str], None], ignored: set[int]) -> None:
    """Serve the page until cancelled; `show` its address, and a warning if it ends by itself.

    `ignored` gets its process id: the supervisor must not take it for a process that a part of the run left behind.
    """
    log = paths.log("page")
    log.parent.mkdir(parents=True, exist_ok=True)
    port = config.port or find_free_port()
    command = [sys.executable, "-m", "prime_rl.entrypoints.page", str(paths.root), "--port", str(port)]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *with_parent_death_signal(command),
            env={name: value for name, value in os.environ.items() if name != ERROR_FILE},
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            start_new_session=True,
        )
    ignored.add(process.pid)
    show(f"page: http://127.0.0.1:{port}, log {log}")
    try:
        code = await process.wait()
        show(f"warning: the page {describe_exit(code)}; the run continues; log {log}")
    finally:
        for stop, seconds in ((process.terminate, _STOP_SECONDS), (process.kill, _KILL_SECONDS)):
            if process.returncode is not None:
                break
            stop()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await process.wait()
