"""The process of an environment in an interpreter of its own: calls to it, and its requests.

Both are JSON texts with their length before them, over one connection; see `environment_runner`.
"""

import asyncio
import base64
import contextvars
import functools
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.rollouts.agent_box import AgentBox
from prime_rl.rollouts.clients.raw_openai_client import PolicyEndpoint, error_body
from prime_rl.rollouts.group_attempts import EnvironmentFailed, UnsupportedEnvironment
from prime_rl.rollouts.separate.crash_record import WorkerUnusable, current_group
from prime_rl.rollouts.separate.environment_runner import HEADER, receive_message
from prime_rl.rollouts.separate.interpreter_server import InterpreterServer
from prime_rl.rollouts.separate.values import CallAgent
from prime_rl_sandbox.shared_sandbox import SharedSandbox


class Call:
    """A call that the other process has not answered yet."""

    def __init__(self, number: int, future: "asyncio.Future[Any]") -> None:
        self.number, self.future = number, future

    def answer_after_cancel(self) -> Any:
        """Return what a cancelled call was answered with; None if it ended without a result."""
        if not self.future.done() or self.future.exception() is not None:
            return None
        return self.future.result()


class Runner:
    """The other process, and the calls to it. It ends with this process."""

    def __init__(
        self,
        interpreter: str,
        endpoint: PolicyEndpoint,
        count_tokens: Callable[..., int],
        sandbox: SharedSandbox,
        call_agent: CallAgent | None = None,
    ) -> None:
        """Start the process. Its requests are answered by these; boxes are those of `sandbox`."""
        self._endpoint, self._sandbox = endpoint, sandbox
        self._count_tokens, self._call_agent = count_tokens, call_agent
        self._requests = dict[int, asyncio.Task[None]]()
        self._boxes = dict[int, AgentBox]()
        self._process = InterpreterServer.of(interpreter).fork()
        self._connection = self._process.connection
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: list[bytes] = []
        self._reading: asyncio.Task[None] | None = None
        self._end = ""

    def call_before_serving(self, op: str, **arguments: Any) -> Any:
        """Call the process and wait; only before the event loop runs.

        Raises:
            EnvironmentFailed: what the environment raised.
            ConfigError: the process has ended.
        """
        assert self._writer is None, "an event loop reads the connection"
        self._num_calls += 1
        try:
            self._connection.sendall(_frame({"call": self._num_calls, "op": op, "group": 0, **arguments}))
            return _result(receive_message(self._connection))
        except (ConnectionError, EOFError):
            raise ConfigError(
                f"{self._process.wait()} while the environment was loaded; its output is in the log of its worker"
            ) from None

    async def call(self, op: str, **arguments: Any) -> Any:
        """Call the process. Raises EnvironmentFailed with what the environment raised."""
        return await self.finish(self.start_call(op, **arguments))

    def start_call(self, op: str, **arguments: Any) -> Call:
        """Send a call, whose answer `finish` awaits."""
        if self._end:
            raise WorkerUnusable(self._end)
        self._num_calls += 1
        future = self._calls[self._num_calls] = asyncio.get_running_loop().create_future()
        self._send({"call": self._num_calls, "op": op, "group": current_group.get(), **arguments})
        return Call(self._num_calls, future)

    async def finish(self, call: Call) -> Any:
        """Await the answer. A cancellation cancels the call, and awaits its cleanup in the other process."""
        try:
            return await asyncio.shield(call.future)
        except asyncio.CancelledError:
            if not call.future.done():
                self._send({"op": "cancel", "call": call.number})
                with suppress(EnvironmentFailed, UnsupportedEnvironment):
                    await asyncio.shield(call.future)
            raise

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._reading is None:
            self._connection.setblocking(False)
            # A new context: it serves all groups, not only the one that calls first.
            self._reading = asyncio.create_task(self._read(), context=contextvars.Context())
        frame = _frame(message)
        if self._writer is None:
            self._waiting.append(frame)
        else:
            self._writer.write(frame)

    async def _read(self) -> None:
        """Resolve the calls by their answers, until the process ends."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        # Processes that it has left may keep its end of the connection open.
        asyncio.get_running_loop().add_reader(self._process.status, self._writer.transport.abort)
        self._writer.writelines(self._waiting)
        with suppress(asyncio.IncompleteReadError, ConnectionError, ValueError):
            while True:
                (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                message = json.loads(await reader.readexactly(length))
                if "request" in message:
                    number = message["request"]
                    task = self._requests[number] = asyncio.create_task(self._answer(**message))
                    task.add_done_callback(functools.partial(self._forget, number))
                elif "cancelled" in message:
                    if (request := self._requests.get(message["cancelled"])) is not None:
                        request.cancel()
                else:
                    self._resolve(message)
        asyncio.get_running_loop().remove_reader(self._process.status)
        for request in [*self._requests.values()]:
            request.cancel()
        self._end = await asyncio.to_thread(self._process.wait)
        await asyncio.gather(*(box.close() for box in self._boxes.values()), return_exceptions=True)
        for future in self._calls.values():
            future.set_exception(WorkerUnusable(self._end))

    def _resolve(self, answer: Mapping[str, Any]) -> None:
        future = self._calls.pop(answer["call"])
        try:
            future.set_result(_result(answer))
        except (EnvironmentFailed, UnsupportedEnvironment) as error:
            future.set_exception(error)
            future.exception()  # it may belong to a cancelled call, whose error nothing reads

    def _forget(self, request: int, _task: "asyncio.Task[None]") -> None:
        del self._requests[request]

    async def _answer(self, request: int, kind: str, **arguments: Any) -> None:
        """Answer a request; also one that fails, for which the environment waits."""
        answer: dict[str, Any] = {"op": "answer", "request": request}
        try:
            if kind == "count":
                answer["result"] = self._count_tokens(**arguments)
            elif kind == "agent":
                assert self._call_agent is not None, "the environment was loaded without one"
                answer["result"] = await self._call_agent(arguments["values"])
            else:
                answer["result"] = await (self._chat if kind == "chat" else self._use_box)(**arguments)
        except Exception as error:  # noqa: BLE001 # of a sandbox, or of messages that cannot be rendered
            answer["error"] = {"kind": type(error).__name__, "message": str(error)}
        self._send(answer)

    async def _chat(self, key: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """Return status and body of the answer to a request to the model, also if its rollout ends before."""
        try:
            return await self._endpoint.ask(key, path, body)
        except asyncio.CancelledError:
            return 401, error_body("the rollout of this key has ended")
        except Exception as error:  # noqa: BLE001 # of the rollout, which records it
            return 500, error_body(summarize_exception(error))

    async def _use_box(self, box: int, op: str, arguments: Mapping[str, Any]) -> Any:
        """Return the result of an operation of an agent's sandbox."""
        used = self._boxes.setdefault(box, AgentBox(self._sandbox))
        if op == "run":
            return await used.run(**arguments)
        if op == "read":
            return base64.b64encode(await used.read(arguments["path"])).decode()
        if op == "write":
            await used.write(arguments["path"], base64.b64decode(arguments["data"]))
        elif op == "forward":
            await used.forward(arguments["ports"])
        else:
            await self._boxes.pop(box).close()
        return None


def _frame(message: Mapping[str, Any]) -> bytes:
    text = json.dumps(message, default=str).encode()
    return HEADER.pack(len(text)) + text


def _result(answer: Mapping[str, Any]) -> Any:
    """Return the result of a call. Raises EnvironmentFailed or UnsupportedEnvironment for an error."""
    if (error := answer.get("error")) is None:
        return answer["result"]
    if error.get("refused"):
        raise UnsupportedEnvironment(str(error["message"]))
    raise EnvironmentFailed(str(error["message"]), bool(error["infrastructure"]))
