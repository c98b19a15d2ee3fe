"""The jails of one process: one per processor, each with a limit of executions at once, restarted when they end."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from loguru import logger

from prime_rl.sandbox.execution import (
    ExecutionRequest,
    ExecutionResult,
    SandboxError,
    SandboxLimits,
    Verdict,
)
from prime_rl.sandbox.jail.control_group import ControlGroup
from prime_rl.sandbox.jail.jail import (
    JailConnection,
    JailLostError,
    JailStartError,
    decode_files,
    encode_files,
)

_GRACE_SECONDS = 10.0
"""Added to the largest time an execution can take, before its jail counts as stuck."""
_REFILL_PAUSE_SECONDS = 30.0
"""Pause after an attempt to replace a jail has failed, while others are left."""
_PROBE = ExecutionRequest(code="")


class Jail(Protocol):
    """What runs executions: `JailProcess`, or its counterpart in a remote machine."""

    num_running: int

    @property
    def control_group(self) -> ControlGroup | None:
        """What limits all of it together; None where this is not possible."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def alive(self) -> bool:
        """Whether the jail runs."""

    def connect(self) -> JailConnection:
        """Return a connection to a prepared child. Raises JailLostError."""

    async def wait_until_ready(self, probe: Mapping[str, Any]) -> None:
        """Run a first request. Raises JailStartError."""

    def read_errors(self) -> str:
        """Return the last line of its errors."""

    def kill(self) -> None:
        """End the jail and everything in it."""

    async def close(self) -> None:
        """End the jail and give back its resources."""


class StartJail(Protocol):
    """Starts a jail. Raises JailStartError."""

    def __call__(self) -> Jail:
        """Return a new jail."""


class JailPool:
    """Runs requests in the jail with the fewest executions.

    Args:
        start: starts a jail.
        num_jails: at most the processors of this machine make sense.
        max_running: executions at once in each jail; further ones wait. Sessions are not counted.
    """

    def __init__(self, start: StartJail, limits: SandboxLimits, num_jails: int, max_running: int) -> None:
        self._start, self._limits, self._num_jails = start, limits, num_jails
        self._slots = asyncio.Semaphore(self._num_jails * max_running)
        # Two sessions each. Their own limit: an execution that holds one slot and waits for another could wait forever.
        self.pair_slots = asyncio.Semaphore(max(1, self._num_jails * max_running // 2))
        self._jails: list[Jail] = []
        self._starting = asyncio.Lock()
        self._refill_at = 0.0
        self._open = False

    async def start(self) -> None:
        """Start the jails.

        Raises:
            JailStartError: one did not start.
        """
        self._open = True
        try:
            await self._fill()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End all jails and everything in them."""
        self._open = False
        jails, self._jails = self._jails, []
        await asyncio.gather(*(jail.close() for jail in jails))

    @property
    def limits_whole_jails(self) -> bool:
        """Whether a control group limits the memory of each jail."""
        return bool(self._jails) and all(jail.control_group is not None for jail in self._jails)

    @property
    def jail_pids(self) -> list[int]:
        """Process ids of the jails."""
        return [jail.pid for jail in self._jails]

    async def run(self, request: ExecutionRequest) -> ExecutionResult:
        """Run a program once. The verdict is `infra` if its jail ended or got stuck, and that jail is replaced."""
        timeout = request.timeout_seconds or self._limits.timeout_seconds
        try:
            async with (
                self._slots,
                self.connect() as connection,
                asyncio.timeout(self.longest_seconds(timeout)),
            ):
                await connection.send(encode_request(request, self._limits))
                return decode_result(await connection.receive())
        except (JailLostError, JailStartError, TimeoutError) as error:
            return ExecutionResult(Verdict.INFRA, stderr=str(error) or "the jail did not answer")

    def longest_seconds(self, timeout: float) -> float:
        """Return how long an execution with this timeout can take."""
        return timeout * self._limits.max_timeout_factor + _GRACE_SECONDS

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[JailConnection]:
        """Return a connection to a prepared child. A jail that does not answer in time is killed.

        Raises:
            JailLostError: the jail ended.
            JailStartError: no jail can be started.
            SandboxError: the pool is closed.
        """
        jail = await self._choose()
        connection = None
        jail.num_running += 1
        try:
            connection = jail.connect()
            yield connection
        except TimeoutError:
            logger.warning("sandbox: killed jail {}, which did not answer in time", jail.pid)
            jail.kill()
            raise
        finally:
            jail.num_running -= 1
            if connection is not None:
                connection.close()

    def _check_open(self) -> None:
        if not self._open:
            raise SandboxError("the sandbox is closed; use it inside `async with Sandbox(...)`")

    async def _choose(self) -> Jail:
        self._check_open()
        if self._lacks_jails:
            async with self._starting:
                if self._lacks_jails:
                    await self._refill()
        return min(self._alive or self._jails, key=lambda jail: jail.num_running)

    @property
    def _alive(self) -> list[Jail]:
        return [jail for jail in self._jails if jail.alive]

    @property
    def _lacks_jails(self) -> bool:
        """Whether jails are to be started: some have ended, also if an attempt to replace them has failed before."""
        alive = len(self._alive)
        return not alive or (alive < self._num_jails and time.monotonic() >= self._refill_at)

    async def _refill(self) -> None:
        """Replace jails that have ended; continue with the others for a while if that fails."""
        try:
            await self._fill()
        except JailStartError as error:
            if not self._alive:
                raise
            self._refill_at = time.monotonic() + _REFILL_PAUSE_SECONDS
            logger.warning("sandbox: {} of {} jails are left: {}", len(self._alive), self._num_jails, error)

    async def _fill(self) -> None:
        self._check_open()
        ended = [jail for jail in self._jails if not jail.alive]
        self._jails = self._alive
        for jail in ended:
            logger.warning(
                "sandbox: jail {} exited; starting another: {}", jail.pid, jail.read_errors() or "no message"
            )
            await jail.close()
        new: list[Jail] = []
        try:
            new += [self._start() for _ in range(self._num_jails - len(self._jails))]
            probe = encode_request(_PROBE, self._limits)
            await asyncio.gather(*(jail.wait_until_ready(probe) for jail in new))
            self._check_open()  # closed meanwhile: nothing else would end the new jails
        except BaseException:
            await asyncio.gather(*(jail.close() for jail in new))
            raise
        self._jails += new


def encode_request(request: ExecutionRequest, limits: SandboxLimits) -> dict[str, Any]:
    """Return the message to the supervisor of an execution."""
    command: dict[str, Any] = {"kind": "argv", "argv": list(request.argv)}
    if request.code is not None:
        command = {"kind": "code", "code": request.code, "module_name": request.module_name}
    return {
        "mode": "run",
        "command": command,
        "stdin": request.stdin,
        "files": encode_files(request.files),
        "outputs": list(request.outputs),
        "timeout_seconds": request.timeout_seconds or limits.timeout_seconds,
        "max_output_bytes": limits.output_bytes,
    }


def decode_result(message: Mapping[str, Any]) -> ExecutionResult:
    """Return the result in a message of a supervisor."""
    report = message["report"] or {}
    return ExecutionResult(
        find_verdict(message, report),
        stdout=message["stdout"],
        stderr=message["stderr"],
        exit_code=message["exit_code"],
        milliseconds=message["milliseconds"],
        files=decode_files(message["files"]),
        value=report.get("value") if isinstance(report.get("value"), str) else None,
    )


def find_verdict(message: Mapping[str, Any], report: Mapping[str, Any]) -> Verdict:
    """Return how an execution or a cell ended."""
    code, last_line = message["exit_code"], message["stderr"].rstrip().rpartition("\n")[2]
    if message["killed_for"] == "timeout":
        return Verdict.TIMEOUT
    if message["killed_for"] == "output" or message["overflowed"]:
        return Verdict.OUTPUT
    if message["killed_for"] == "error":
        return Verdict.ERROR
    if code == 0 and not report:
        return Verdict.OK
    if report and not report.get("failed") and message["alive"]:
        return Verdict.OK
    # The supervisor did not kill it, so a SIGKILL comes from the kernel, which had no memory left.
    if code == -9 or report.get("memory") is True or last_line.startswith("MemoryError"):
        return Verdict.MEMORY
    return Verdict.ERROR
