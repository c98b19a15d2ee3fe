"""The jails of one process: one per processor, each with a limit of executions at once, restarted when they end."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from typing import Any, Protocol

from loguru import logger

from prime_rl_sandbox.execution import ExecutionRequest, ExecutionResult, SandboxError, SandboxLimits, Verdict
from prime_rl_sandbox.jail.jail import (
    ControlGroup,
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
_MAX_SESSIONS = 1000
"""In each jail. They hold two processes each while they wait for a cell."""
_PROBE = ExecutionRequest(code="")


class Jail(Protocol):
    """What runs executions: `JailProcess`, or its counterpart in a remote machine."""

    num_running: int

    @property
    def control_group(self) -> ControlGroup | None:
        """Control group of the jail; None if control groups are unavailable."""

    @property
    def pid(self) -> int:
        """Process id of the jail's outermost process."""

    @property
    def alive(self) -> bool:
        """Whether the processes of the jail run."""

    def connect(self) -> JailConnection:
        """Return a connection to a prepared child. Raises JailLostError."""

    async def wait_until_ready(self, probe: Mapping[str, Any]) -> None:
        """Wait until a first request has succeeded. Raises JailStartError."""

    def read_errors(self) -> str:
        """Return the last line that the jail wrote to stderr."""

    def kill(self) -> None:
        """Kill every process of the jail."""

    async def close(self) -> None:
        """End the jail and give back its resources."""


StartJail = Callable[[], Jail]
"""Starts a jail. Raises JailStartError."""


class JailPool:
    """Runs requests in the jail with the fewest executions.

    Args:
        start: starts a jail.
        num_jails: at most the processors of this machine make sense.
        max_running: executions at once in each jail; further ones wait. Sessions have a limit of their own.
    """

    def __init__(self, start: StartJail, limits: SandboxLimits, num_jails: int, max_running: int) -> None:
        self._start, self._limits, self._num_jails = start, limits, num_jails
        self._slots = asyncio.Semaphore(self._num_jails * max_running)
        # Two sessions each. Their own limit: an execution that holds one slot and waits for another could wait forever.
        self.pair_slots = asyncio.Semaphore(max(1, self._num_jails * max_running // 2))
        self._session_slots = asyncio.Semaphore(self._num_jails * _MAX_SESSIONS)
        self._jails: list[Jail] = []
        self._starting, self._alone = asyncio.Lock(), asyncio.Lock()
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
        """Run a program once. The verdict is `infra` if its jail ended or got stuck, and that jail is replaced.

        A program that the kernel ended for lack of memory of its jail is run again in a jail of its own.
        """
        try:
            async with self._slots, self.connect() as connection:
                message = await self._exchange(connection, request)
            if message["kernel_killed_for"] == "jail" and self.limits_whole_jails:
                message = await self._run_alone(request)
            return decode_result(message)
        except (JailLostError, JailStartError, TimeoutError) as error:
            return ExecutionResult(Verdict.INFRA, stderr=str(error) or "the jail did not answer")

    async def _exchange(self, connection: JailConnection, request: ExecutionRequest) -> dict[str, Any]:
        async with asyncio.timeout(self.longest_seconds(request.timeout_seconds or self._limits.timeout_seconds)):
            await connection.send(encode_request(request, self._limits))
            return await connection.receive()

    async def _run_alone(self, request: ExecutionRequest) -> dict[str, Any]:
        """Run a program in a new jail, one at a time. If it reaches the jail's limit, the program itself has."""
        async with self._alone:
            self._check_open()
            jail = self._start()
            try:
                await jail.wait_until_ready(encode_request(_PROBE, self._limits))
                with closing(jail.connect()) as connection:
                    message = await self._exchange(connection, request)
                if message["kernel_killed_for"] and jail.control_group and jail.control_group.reached_its_limit():
                    message["kernel_killed_for"] = "own"
                return message
            finally:
                await jail.close()

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
        jail, connection = await self._connect()
        jail.num_running += 1
        try:
            yield connection
        except TimeoutError:
            logger.warning("sandbox: killed jail {}, which did not answer in time", jail.pid)
            jail.kill()
            raise
        finally:
            jail.num_running -= 1
            connection.close()

    @asynccontextmanager
    async def connect_session(self) -> AsyncIterator[JailConnection]:
        """As `connect`, but wait while there are as many sessions as the jails may have."""
        async with self._session_slots, self.connect() as connection:
            yield connection

    async def _connect(self) -> tuple[Jail, JailConnection]:
        """Connect to a jail. One that has just ended has not answered anything, so the next takes its place."""
        for _ in range(self._num_jails):
            jail = await self._choose()
            try:
                return jail, jail.connect()
            except JailLostError:
                jail.kill()
        jail = await self._choose()
        return jail, jail.connect()

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
    """Return how an execution or a cell ended.

    `infra` if the kernel ended its processes although it was below its own limit: a neighbour may have used the memory.
    """
    code, last_line = message["exit_code"], message["stderr"].rstrip().rpartition("\n")[2]
    if message["kernel_killed_for"] == "jail":  # also if it waited until the timeout for a process that was ended
        return Verdict.INFRA
    if message["killed_for"] == "timeout":
        return Verdict.TIMEOUT
    if message["killed_for"] == "output" or message["overflowed"]:
        return Verdict.OUTPUT
    if message["killed_for"] == "error":
        return Verdict.ERROR
    if message["kernel_killed_for"] == "own":
        return Verdict.MEMORY
    if code == 0 and not report:
        return Verdict.OK
    if report and not report.get("failed") and message["alive"]:
        return Verdict.OK
    if report.get("memory") is True or last_line.startswith("MemoryError"):
        return Verdict.MEMORY
    return Verdict.ERROR
