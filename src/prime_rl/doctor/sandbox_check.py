"""`doctor --sandbox`: whether this machine can isolate model-written code."""

import asyncio
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from prime_rl.core.errors import ConfigError
from prime_rl.sandbox.jail.bubblewrap import JAIL_UID, bubblewrap_version, find_bubblewrap, find_interpreter
from prime_rl.sandbox.prime.prime_jail import check_prime
from prime_rl.sandbox.sandbox import Sandbox
from prime_rl.sandbox.wasm.component import component_path

_NUM_EXECUTIONS = 20


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """What the machine supports: `isolated` after a successful self-test, else the reason in `message`."""

    isolated: bool
    message: str

    def lines(self) -> list[str]:
        """Return the report as text, with the other backends and what they need."""
        if self.isolated:
            return [f"sandbox: bwrap, isolated: {self.message}"]
        return [
            f"sandbox: not available: {self.message}",
            f"sandbox: backend wasm, for Python code alone: {_find_missing(component_path)}",
            f"sandbox: backend prime, in remote machines: {_find_missing(check_prime)}",
            "sandbox: unsafe-subprocess would run model-written code with your rights and without any isolation",
        ]


def _find_missing(check: Callable[[], object]) -> str:
    try:
        check()
    except ConfigError as error:
        return f"not available: {error}"
    return "installed; select it with `backend` (docs/sandbox.md)"


def check_sandbox() -> SandboxReport:
    """Start a sandbox, try to escape from it, and measure a few executions."""
    try:
        milliseconds, limits_whole_jails = asyncio.run(_measure())
        user = JAIL_UID if os.getuid() == 0 else None
        interpreter = find_interpreter(user)
        version = bubblewrap_version(find_bubblewrap())
    except ConfigError as error:
        return SandboxReport(False, str(error))
    memory = "a control group limits each jail" if limits_whole_jails else "no control groups: limits of processes only"
    speed = f"{milliseconds:.1f} ms for an execution (median)"
    return SandboxReport(True, f"{version}, {interpreter}, self-test passed, {memory}, {speed}")


async def _measure() -> tuple[float, bool]:
    """Return the median milliseconds of an execution, and whether control groups are available."""
    async with Sandbox(num_jails=1) as sandbox:
        results = [await sandbox.run("print(1)") for _ in range(_NUM_EXECUTIONS)]
        return statistics.median(result.milliseconds for result in results), sandbox.limits_whole_jails
