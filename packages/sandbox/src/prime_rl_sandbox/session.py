"""Persistent Python sessions in a sandbox, and assert-style tests that the tested code cannot reach.

A session has cells in one namespace, files, calls of functions on the host, and ports that lead to servers of the host.

Assert-style tests and the tested code run in two sandboxes. In that of the tests, each tested function is a stand-in
that sends its arguments as JSON through the host to the other one, and returns the plain value that comes back. The
code under test therefore cannot skip, patch or read the tests: `os._exit`, a patched `builtins`, an `__eq__` that
returns True and a printed end marker have no effect on them. The tests passed if their sandbox reports a random text
after the last one.
"""

import asyncio
import base64
import inspect
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self

from prime_rl_sandbox import plain_values
from prime_rl_sandbox.execution import (
    AssertResult,
    ExecutionResult,
    SandboxError,
    SandboxLimits,
    Verdict,
    check_file_name,
    check_files,
    check_timeout,
)
from prime_rl_sandbox.jail.jail import JailConnection, JailLostError, JailStartError, encode_files
from prime_rl_sandbox.jail.jail_pool import JailPool, decode_result
from prime_rl_sandbox.jail.jail_ports import WINDOW_BYTES

Answer = Callable[[str], Awaitable[str]]
"""Answers `host_call(text)` in the session. The text is untrusted."""
_PART_BYTES = 65536
_PLAIN_VALUES = inspect.getsource(plain_values)
_SOLUTION_SIDE = """
import json as _json, sys as _sys
__name__ = "solution"
_sys.modules["solution"] = _sys.modules["__main__"]
_sys.set_int_max_str_digits(0) if hasattr(_sys, "set_int_max_str_digits") else None
_codec = {"__name__": "plain_values"}
exec(__CODEC__, _codec)
def _serve(_host_call=host_call, _codec=_codec, _namespace=globals()):
    reply = {"ready": True}
    while True:
        request = _json.loads(_host_call(_json.dumps(reply)))
        try:
            args, kwargs = _codec["decode_value"](request["args"]), _codec["decode_value"](request["kwargs"])
            value = _namespace[request["function"]](*args, **kwargs)
            value = list(value) if hasattr(value, "__next__") or isinstance(value, range) else value
            reply = {"value": _codec["encode_value"](value), "args": _codec["encode_value"](args)}
        except Exception as error:
            reply = {"error": type(error).__name__, "message": str(error)[:1000]}
"""
_TEST_SIDE = """
import builtins as _builtins, json as _json, sys as _sys
_sys.set_int_max_str_digits(0) if hasattr(_sys, "set_int_max_str_digits") else None
_codec = {"__name__": "plain_values"}
exec(__CODEC__, _codec)
def _stand_in(name, host_call=host_call, encode=_codec["encode_value"], decode=_codec["decode_value"]):
    def call(*args, **kwargs):
        request = {"function": name, "args": encode(list(args)), "kwargs": encode(kwargs)}
        reply = _json.loads(host_call(_json.dumps(request)))
        if "error" in reply:
            kind = getattr(_builtins, str(reply["error"]), None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            if issubclass(kind, (StopIteration, StopAsyncIteration)):  # it would end the loop of a test, which passes
                kind = RuntimeError
            if issubclass(kind, UnicodeError):  # it has other arguments
                kind = ValueError
            raise kind(f"{reply['error']}: {reply.get('message', '')}")
        for mine, theirs in zip(args, decode(reply["args"])):
            if isinstance(mine, list) and isinstance(theirs, list) and mine != theirs:
                mine[:] = theirs
            elif isinstance(mine, (dict, set)) and type(mine) is type(theirs) and mine != theirs:
                mine.clear()
                mine.update(theirs)
        return decode(reply["value"])
    call.__name__ = name
    return call
"""
_ENDED = '{"error": "RuntimeError", "message": "the tested code has ended"}'


class Session:
    """A Python interpreter that keeps its state from cell to cell. Use it with `async with`.

    A cell that takes too long gets a KeyboardInterrupt; if it does not stop then, the session ends. After its end
    each cell has the verdict of the cell that ended it.
    """

    def __init__(
        self,
        pool: JailPool,
        limits: SandboxLimits,
        answer: Answer | None = None,
        is_isolated: bool = True,
        is_counted: bool = True,
    ) -> None:
        self._pool, self._limits, self._answer, self._is_isolated = pool, limits, answer, is_isolated
        self._context = pool.connect_session() if is_counted else pool.connect()
        self._connection: JailConnection | None = None
        self._ended_by: Verdict | None = None
        self._lock, self._send_lock = asyncio.Lock(), asyncio.Lock()
        self._streams = _Streams(self._send)

    async def __aenter__(self) -> Self:
        """Open the session; wait first while there are too many.

        Raises:
            SandboxError: the sandbox failed.
        """
        try:
            self._connection = await self._context.__aenter__()
            async with asyncio.timeout(self._pool.longest_seconds(self._limits.timeout_seconds)):
                command = {"kind": "session", "calls": self._answer is not None}
                opening = {"mode": "session", "command": command, "stdin": "", "files": {}, "outputs": []}
                await self._connection.send(opening | {"max_output_bytes": self._limits.output_bytes})
                await self._connection.receive()
        except BaseException as error:
            if self._connection is not None:
                await self._context.__aexit__(type(error), error, error.__traceback__)
            if not isinstance(error, JailLostError | JailStartError | TimeoutError):
                raise
            raise SandboxError(f"the sandbox cannot open a session: {error}") from None
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """End the session and all processes in it."""
        await self._streams.close()
        await self._context.__aexit__(None, None, None)

    @property
    def alive(self) -> bool:
        """Whether the session can run another cell."""
        return self._ended_by is None

    async def forward(self, ports: Collection[int]) -> None:
        """Let programs of the session connect to these TCP ports of 127.0.0.1 on this machine, while a cell runs.

        Raises:
            SandboxError: the session has ended, or a program of it has such a port.
        """
        if not self._is_isolated:  # its programs see the network of this machine
            return
        async with self._lock:
            self._streams.ports.update(ports)
            try:
                async with asyncio.timeout(self._pool.longest_seconds(self._limits.timeout_seconds)):
                    await self._send({"listen": list(ports)})
                    reply = await self._receive()
            except (JailLostError, TimeoutError) as error:
                self._ended_by = Verdict.INFRA
                raise SandboxError(f"the sandbox cannot forward ports: {error}") from None
            if reply["listening"] is not None:
                raise SandboxError(f"the sandbox cannot forward ports: {reply['listening']}")

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
        check_timeout(timeout)
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
        await self._send(cell)
        while "call" in (message := await self._receive()):
            answer = await self._answer(message["call"]) if self._answer is not None else ""
            with suppress(JailLostError):  # the cell has ended meanwhile; its result is still to be read
                await self._send({"answer": answer})
        return message

    async def _receive(self) -> dict[str, Any]:
        """Return the next message that is not of a connection."""
        assert self._connection is not None, "use the session inside `async with`"
        while "stream" in (message := await self._connection.receive()):
            self._streams.receive(message)
        return message

    async def _send(self, message: Mapping[str, Any]) -> None:
        assert self._connection is not None, "use the session inside `async with`"
        async with self._send_lock:
            await self._connection.send(message)


class _Connection:
    """One connection: what has been received of it, and how many bytes sent to it were not taken; see `jail_ports`."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[str | None] = asyncio.Queue()
        self.untaken = 0
        self.was_taken = asyncio.Event()


class _Streams:
    """Connections of the programs of a session to ports of this machine; see `jail_ports`.

    Attributes:
        ports: to which they may connect.
    """

    def __init__(self, send: Callable[[Mapping[str, Any]], Awaitable[None]]) -> None:
        self.ports = set[int]()
        self._send = send
        self._connections: dict[int, _Connection] = {}
        self._tasks = set[asyncio.Task[None]]()

    def receive(self, message: Mapping[str, Any]) -> None:
        """Take a message of a connection."""
        number = message["stream"]
        if "port" in message:
            self._connections[number] = _Connection()
            task = asyncio.create_task(self._relay(number, message["port"]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (connection := self._connections.get(number)) is not None:
            if "taken" in message:
                connection.untaken -= message["taken"]
                connection.was_taken.set()
            else:
                connection.received.put_nowait(message["data"])

    async def close(self) -> None:
        """End all connections."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _relay(self, number: int, port: int) -> None:
        writer, connection = None, self._connections[number]
        try:
            if port not in self.ports:
                raise ConnectionRefusedError(port)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._write(number, connection, writer))
                while data := await reader.read(_PART_BYTES):
                    connection.untaken += len(data)
                    await self._send({"stream": number, "data": base64.b64encode(data).decode()})
                    while connection.untaken > WINDOW_BYTES - _PART_BYTES:
                        connection.was_taken.clear()
                        await connection.was_taken.wait()
                await self._send({"stream": number, "data": ""})
            writer.close()
            writer = None
        except* (OSError, JailLostError):
            with suppress(JailLostError):
                await self._send({"stream": number, "data": None})
        finally:
            del self._connections[number]
            if writer is not None:
                writer.transport.abort()  # a server that reads nothing would keep what `close` has to write

    async def _write(self, number: int, connection: "_Connection", writer: asyncio.StreamWriter) -> None:
        while data := await connection.received.get():
            content = base64.b64decode(data)
            writer.write(content)
            await writer.drain()
            await self._send({"stream": number, "taken": len(content)})
        if data is None:
            raise ConnectionResetError(number)
        if writer.can_write_eof():
            writer.write_eof()


class _SolutionSide:
    """Runs the tested code, and answers calls of the tests from it."""

    def __init__(self, code: str, seconds: float) -> None:
        self.code, self.seconds = code, seconds
        self.ready = asyncio.Event()
        self.result: ExecutionResult | None = None
        self._requests: asyncio.Queue[str] = asyncio.Queue()
        self._replies: asyncio.Queue[str] = asyncio.Queue()

    async def answer(self, reply: str) -> str:
        """Take a reply of the tested code, and return the next request for it."""
        if self.ready.is_set():
            self._replies.put_nowait(reply)
        self.ready.set()
        return await self._requests.get()

    async def call(self, request: str) -> str:
        """Return the reply of the tested code to a call of the tests."""
        if self.result is not None:
            return _ENDED
        self._requests.put_nowait(request)
        return await self._replies.get()

    async def run(self, session: Session) -> None:
        """Run until the session ends or the task is cancelled."""
        loaded = await session.run(_SOLUTION_SIDE.replace("__CODEC__", repr(_PLAIN_VALUES)), timeout=self.seconds)
        program = self.code + "\n\n_serve()\n"
        self.result = await session.run(program, timeout=self.seconds) if loaded.ok else loaded
        self.ready.set()
        self._replies.put_nowait(_ENDED)


async def run_asserts(
    pool: JailPool,
    limits: SandboxLimits,
    code: str,
    tests: str,
    functions: Sequence[str],
    *,
    setup: str = "",
    timeout: float,
) -> AssertResult:
    """Run tests against functions of the code; arguments as in `Sandbox.run_asserts`."""
    solution = _SolutionSide(code, timeout)
    nonce = secrets.token_hex(16)
    stand_ins = "\n".join(f"{name} = _stand_in({name!r})" for name in functions)
    test_side = _TEST_SIDE.replace("__CODEC__", repr(_PLAIN_VALUES))
    program = f"{setup}\n{test_side}\n{stand_ins}\n{tests}\n{nonce!r}\n"
    async with (
        pool.pair_slots,
        Session(pool, limits, solution.answer, is_counted=False) as code_session,
        Session(pool, limits, solution.call, is_counted=False) as session,
    ):
        task = asyncio.create_task(solution.run(code_session))
        try:
            await solution.ready.wait()
            if solution.result is not None:
                return _failure(solution.result)
            tested = await session.run(program, timeout=timeout)
            if tested.ok and tested.value == repr(nonce):
                return AssertResult(True, Verdict.OK, latency_ms=tested.milliseconds)
            if solution.result is not None and not solution.result.ok:
                return _failure(solution.result)
            return _failure(tested)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _failure(result: ExecutionResult) -> AssertResult:
    verdict = Verdict.ERROR if result.verdict is Verdict.OK else result.verdict
    lines = result.stderr.strip().splitlines()
    return AssertResult(False, verdict, lines[-1] if lines else f"ended with {verdict}", result.milliseconds)
