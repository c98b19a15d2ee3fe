"""One sandbox for all rollouts of an environment, started by the first that needs it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prime_rl_sandbox.execution import SandboxLimits, current_settings
from prime_rl_sandbox.sandbox import Sandbox

_open = set["SharedSandbox"]()


async def close_shared_sandboxes() -> None:
    """End the sandboxes that are open, at the end of a process: its remote machines would outlive it."""
    await asyncio.gather(*(shared.close() for shared in _open.copy()))


class SharedSandbox:
    """The sandbox of the running event loop. It starts with the first `open`, and ends with `close` or the process.

    Args:
        options: keyword arguments of `Sandbox`; what is missing comes from the run's configuration.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._sandbox: Sandbox | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()

    @property
    def limits(self) -> SandboxLimits:
        """Limits of each execution."""
        return self._options.get("limits") or current_settings().limits

    def check(self) -> None:
        """Start and end a sandbox in another thread, so that a machine that cannot isolate code fails at the start.

        With the backend `prime`, whose start takes minutes, only the package and the key are checked.

        Raises:
            SandboxConfigError: this machine cannot isolate code. The message contains the fix.
        """

        sandbox = Sandbox(**{**self._options, "num_jails": 1, "num_warm": 1})
        if sandbox.backend == "prime":
            return

        async def start() -> None:
            async with sandbox:
                pass

        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, start()).result()

    async def open(self) -> Sandbox:
        """Return the sandbox of the running loop.

        Raises:
            SandboxConfigError: this machine cannot isolate code.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._sandbox, self._loop, self._lock = None, loop, asyncio.Lock()
        async with self._lock:
            if self._sandbox is None:
                self._sandbox = await Sandbox(**self._options).__aenter__()
                _open.add(self)
            return self._sandbox

    async def close(self) -> None:
        """End the sandbox; the next `open` starts another one."""
        _open.discard(self)
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.__aexit__(None, None, None)
