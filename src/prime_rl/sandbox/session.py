"""A persistent Python session in a sandbox: cells in one namespace, files, and calls of functions on the host."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from prime_rl.sandbox.execution import (
    ExecutionResult,
    SandboxError,
    SandboxLimits,
    Verdict,
    check_file_name,
    check_files,
)
from prime_rl.sandbox.jail.jail import JailConnection, JailLostError, JailStartError, encode_files
from prime_rl.sandbox.jail.jail_pool import JailPool, decode_result

Answer = Callable[[str], Awaitable[str]]
"""Answers `host_call(text)` in the session. The text is untrusted."""


class Session:
    """A Python interpreter that keeps its state from cell to cell. Use it with `async with`.

    A cell that takes too long gets a KeyboardInterrupt; if it does not stop then, the session ends. After its end
    each cell has the verdict of the cell that ended it.
    """

    def __init__(self, pool: JailPool, limits: SandboxLimits, answer: Answer | None = None) -> None:
        self._pool, self._limits, self._answer = pool, limits, answer
        self._context = pool.connect()
        self._connection: JailConnection | None = None
        self._ended_by: Verdict | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Open the session.

        Raises:
            SandboxError: the sandbox failed.
        """
        try:
            self._connection = await self._context.__aenter__()
            async with asyncio.timeout(self._pool.longest_seconds(self._limits.timeout_seconds)):
                await self._connection.send(self._opening())
                await self._connection.receive()
        except (JailLostError, JailStartError, TimeoutError) as error:
            if self._connection is not None:
                await self._context.__aexit__(type(error), error, error.__traceback__)
            raise SandboxError(f"the sandbox cannot open a session: {error}") from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the session and all processes in it."""
        await self._context.__aexit__(None, None, None)

    @property
    def alive(self) -> bool:
        """Whether the session can run another cell."""
        return self._ended_by is None

    async def run(
        self,
        code: str,
        *,
        files: Mapping[str, str | bytes] | None = None,
        outputs: Sequence[str] = (),
        timeout: float | None = None,
    ) -> ExecutionResult:
        """Run a cell and return its output, the files in `outputs`, and the `repr` of its last expression.

        Raises:
            ValueError: a file name leads out of the working directory, or the files are too large.
        """
        check_files(files or {}, self._limits)
        for name in outputs:
            check_file_name(name)
        async with self._lock:
            if self._ended_by is not None:
                return ExecutionResult(self._ended_by, stderr="the session has ended")
            seconds = timeout or self._limits.timeout_seconds
            cell = {
                "command": {"code": code},
                "files": encode_files(files or {}),
                "outputs": list(outputs),
                "timeout_seconds": seconds,
            }
            try:
                async with asyncio.timeout(self._pool.longest_seconds(seconds)):
                    message = await self._exchange(cell)
            except (JailLostError, TimeoutError) as error:
                self._ended_by = Verdict.INFRA
                return ExecutionResult(Verdict.INFRA, stderr=str(error) or "the jail did not answer")
            except asyncio.CancelledError:
                self._ended_by = Verdict.INFRA
                raise
            result = decode_result(message)
            if not message["alive"]:
                if result.ok:  # an exit code of 0 in the middle of a cell
                    result = replace(result, verdict=Verdict.ERROR)
                self._ended_by = result.verdict
            return result

    async def _exchange(self, cell: Mapping[str, Any]) -> dict[str, Any]:
        assert self._connection is not None, "use the session inside `async with`"
        await self._connection.send(cell)
        while "call" in (message := await self._connection.receive()):
            answer = await self._answer(message["call"]) if self._answer is not None else ""
            with suppress(JailLostError):  # the cell has ended meanwhile; its result is still to be read
                await self._connection.send({"answer": answer})
        return message

    def _opening(self) -> dict[str, Any]:
        return {
            "mode": "session",
            "command": {"kind": "session", "calls": self._answer is not None},
            "stdin": "",
            "files": {},
            "outputs": [],
            "max_output_bytes": self._limits.output_bytes,
        }
