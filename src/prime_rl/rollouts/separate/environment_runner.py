"""Runs one environment in a Python interpreter of its own, for the environment worker that started it.

A script: it needs only the standard library, on Python 3.10 or later, and the environment's own packages. It imports
nothing of prime_rl but the files of this folder. Messages on the socket to the worker are a length (4 bytes, little
endian) and a JSON object; see `_Runner`. The worker answers the environment's requests to the model, and records the
tokens.
"""

import sys
from importlib import import_module
from types import ModuleType

if __name__ == "__main__":
    # As a package of its own name: the environment imports nothing from this folder, and finds no prime_rl.
    package = ModuleType("_environment_runner")
    package.__path__ = [sys.path.pop(0)]
    sys.modules[package.__name__] = package
    import_module("_environment_runner.environment_runner").main()
    sys.exit()

import asyncio
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import random
import selectors
import signal
import socket
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .crash_record import CrashRecord, current_group
from .values import (
    Refused,
    RequestFailed,
    cancelled_calls,
    current_call,
    describe,
    exports_taskset,
    plain,
    was_cancelled,
)

HEADER = struct.Struct("<I")
"""Length of the JSON text that follows."""

_NUM_THREADS = 512
"""Threads of tools and rewards, as in environment workers."""

_PR_SET_PDEATHSIG = 1
_STATUS = struct.Struct("<i")
"""Exit code of a process; minus the number of the signal that killed it."""


def receive_message(connection: socket.socket) -> Any:
    """Return the next message of a blocking connection. Raises EOFError if it has ended."""

    def receive(count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = connection.recv(count - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    (length,) = HEADER.unpack(receive(HEADER.size))
    return json.loads(receive(length))


def _frame(message: Mapping[str, Any]) -> bytes:
    text = json.dumps(plain(message)).encode()
    return HEADER.pack(len(text)) + text


def _error(error: BaseException) -> dict[str, Any]:
    if was_cancelled(error):
        return {"message": "it was cancelled", "infrastructure": False}
    if isinstance(error, Refused):
        return {"message": str(error), "infrastructure": False, "refused": True}
    return describe(error)


class _Runner:
    """Answers the calls of the worker: first `load`, then those of an adapter, with its methods' arguments by name.

    `cancel` ends a running call, which is answered with an error. `request` asks the worker, whose `answer` follows.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._adapter: Any = None
        self._running: dict[int, asyncio.Task[None]] = {}
        self._requests: dict[int, asyncio.Future[Any]] = {}
        self._num_requests = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer: asyncio.StreamWriter | None = None

    def load(self) -> None:
        """Answer the first call, `load`, without an event loop: environments use their own while they load."""
        call = receive_message(self._connection)
        try:
            answer = {"result": self._load(call)}
        except BaseException as error:  # noqa: BLE001 # foreign code may raise anything
            answer = {"error": _error(error)}
        self._connection.sendall(_frame({"call": call["call"], **answer}))

    async def serve(self) -> None:
        """Answer calls until the worker disconnects."""
        self._connection.setblocking(False)
        self._loop = asyncio.get_running_loop()
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                call = json.loads(await reader.readexactly(length))
                if call["op"] == "answer":
                    answered = self._requests.get(call["request"])
                    if answered is not None and not answered.done():
                        if (error := call.get("error")) is None:
                            answered.set_result(call["result"])
                        else:
                            answered.set_exception(RequestFailed(error["kind"], error["message"]))
                    continue
                number = call["call"]
                if call["op"] != "cancel":
                    current_group.set(call.pop("group"))
                    self._running[number] = asyncio.create_task(self._answer(call))
                    current_group.set(0)
                    await asyncio.sleep(0)  # it starts: a task that is cancelled before would never answer
                elif number in self._running:
                    cancelled_calls.add(number)
                    self._running[number].cancel()
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        if self._adapter is not None:
            await self._adapter.close()

    async def request(self, kind: str, **arguments: Any) -> Any:
        """Return the worker's answer to a request.

        chat: `key`, `path` and `body` of a request of an OpenAI client; the answer is a status and a body.
        count: the number of tokens of `messages` with `tools`.
        box: the operation `op` of the sandbox with the number `box`.
        agent: calls the agent function with `values`.

        Raises RequestFailed: the worker could not answer. Raises TypeError or ValueError: an argument is not JSON.
        """
        assert self._loop is not None and self._writer is not None
        if asyncio.get_running_loop() is not self._loop:  # of a thread of the environment
            request = self.request(kind, **arguments)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(request, self._loop))
        self._num_requests += 1
        number = self._num_requests
        text = json.dumps({"request": number, "kind": kind, **arguments}).encode()
        future = self._requests[number] = self._loop.create_future()
        self._writer.write(HEADER.pack(len(text)) + text)
        try:
            return await future
        finally:
            del self._requests[number]
            if future.cancelled():
                self._writer.write(_frame({"cancelled": number}))

    async def _answer(self, call: dict[str, Any]) -> None:
        number, op = call.pop("call"), call.pop("op")
        current_call.set(number)
        try:
            frame = _frame({"call": number, "result": await getattr(self._adapter, op)(**call)})
        except BaseException as error:  # noqa: BLE001 # foreign code may raise anything; the worker awaits an answer
            frame = _frame({"call": number, "error": _error(error)})
        self._running.pop(number, None)
        cancelled_calls.discard(number)
        assert self._writer is not None
        self._writer.write(frame)
        await self._writer.drain()

    def _load(self, call: dict[str, Any]) -> dict[str, Any]:
        """Load the environment with the adapter of its API; `call` has its keys."""
        try:
            installed = version("verifiers")
        except PackageNotFoundError:
            raise Refused("verifiers is not among its requirements") from None
        convert = None
        if importlib.util.find_spec("verifiers.types") is not None:
            from .classic_adapter import use_message_dicts

            convert = use_message_dicts()  # before the environment imports names of verifiers
        module = _import(call["id"], call["path"])
        is_classic = hasattr(module, "load_environment")
        if is_classic and (call["command"] or call["has_agent"]):
            is_classic = not exports_taskset(module)
        if is_classic:
            if convert is None:
                raise Refused(f"it has load_environment(), and verifiers {installed} has no classic API")
            from .classic_adapter import ClassicAdapter

            self._adapter = ClassicAdapter(module, call["args"], call["split"], convert, self.request)
        elif importlib.util.find_spec("verifiers.v1") is not None:
            from .taskset_adapter import SeparateTaskset

            settings = call["args"], call["runtime"], call["command"], call["has_agent"], call["counts_zero"]
            self._adapter = SeparateTaskset(module, call["id"], *settings, call["install"], self.request)
        else:
            raise Refused(f"{module.__name__} has no load_environment(), and verifiers {installed} has no v1 API")
        return {
            "is_classic": is_classic,
            "examples": len(self._adapter),
            "eval_split": self._adapter.eval_split,
            "warnings": self._adapter.warnings,
            "uses_sandbox": getattr(self._adapter, "uses_sandbox", False),
        }


def _import(name: str, path: str | None) -> Any:
    """Import the module of an environment: a file, or a module of an installed package, those of verifiers first."""
    if path is None:
        with contextlib.suppress(ModuleNotFoundError):  # before it had tasksets
            if importlib.util.find_spec(own := f"verifiers.v1.tasksets.{name}") is not None:
                return import_module(own)
        return import_module(name)
    file = Path(path)
    is_package = file.name == "__init__.py"
    sys.path.append(str(file.parent.parent if is_package else file.parent))
    locations = [str(file.parent)] if is_package else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=locations)
    if spec is None or spec.loader is None:
        raise Refused(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


Job = tuple[socket.socket, CrashRecord]
"""What a new process gets: its connection to the worker, and the worker's crash record."""


class _ForkServer:
    """Forks a process for each worker.

    A worker sends the descriptors of its connection, log, status pipe, of itself, and of its crash record.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control, self._selector = control, selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._children: dict[int, tuple[int, int, int]] = {}
        """The descriptors of process, worker and status pipe, by process id."""

    def serve(self) -> Job | None:
        """Return a job in each forked process; return None here when the starting process disconnects."""
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    data, fds, *_ = socket.recv_fds(self._control, 1, 5, socket.MSG_CMSG_CLOEXEC)
                    if not data:
                        for pid in self._children:
                            _kill_session(pid)
                        return None
                    try:
                        if (job := self._fork(*fds)) is not None:
                            return job
                    except (OSError, TypeError) as error:  # no process, or fewer descriptors than were sent
                        print(f"no process for an environment: {error}", file=sys.stderr, flush=True)
                        for fd in fds:  # the worker sees that its connection ends
                            with contextlib.suppress(OSError):
                                os.close(fd)
                elif (pid := key.data) in self._children:
                    _kill_session(pid)  # of an ended process, what it has left; or its worker has ended
                    self._reap(pid)

    def _fork(self, connection: int, log: int, status: int, worker: int, page: int) -> Job | None:
        server = os.getpid()
        if (pid := os.fork()) == 0:
            os.setsid()
            _die_with_parent()
            if os.getppid() != server:
                os._exit(1)
            self._selector.close()
            self._control.close()
            for fd in (status, worker, *(fd for fds in self._children.values() for fd in fds)):
                os.close(fd)
            os.dup2(log, 2)
            os.dup2(log, 1)  # environments print to stdout
            os.close(log)
            random.seed()  # the fork copies the global generators; all would draw the same numbers
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed()
            record = CrashRecord.map(page)
            os.close(page)
            return socket.socket(fileno=connection), record
        for fd in (connection, log, page):
            os.close(fd)
        self._children[pid] = os.pidfd_open(pid), worker, status
        for fd in self._children[pid][:2]:
            self._selector.register(fd, selectors.EVENT_READ, pid)
        return None

    def _reap(self, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        process, worker, pipe = self._children.pop(pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, _STATUS.pack(os.waitstatus_to_exitcode(status)))
        for fd in (process, worker):
            self._selector.unregister(fd)
        for fd in (process, worker, pipe):
            os.close(fd)


def _kill_session(pid: int) -> None:
    for kill in (os.kill, os.killpg):  # just forked, it has no session yet
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _preload() -> None:
    """Import what environments import, as far as it is there."""
    for name in ("datasets", "openai", "verifiers.types", "verifiers.v1"):
        with contextlib.suppress(Exception):  # the process that needs it raises
            import_module(name)


def main() -> None:
    """Fork processes that serve their workers; the argument is the file descriptor of a SOCK_SEQPACKET socket."""
    _die_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    _preload()
    gc.collect()
    gc.freeze()  # otherwise garbage collection in the forks would write to the shared pages and copy them
    job = _ForkServer(control).serve()
    if job is not None:
        _serve(*job)


def _serve(connection: socket.socket, record: CrashRecord) -> None:
    os.register_at_fork(after_in_child=connection.close)  # otherwise the worker would not see that this process ends
    runner = _Runner(connection)
    try:
        runner.load()
    except EOFError:  # the worker has ended
        return
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    record.other_pid = os.getpid()
    record.watch(loop, is_other=True)
    loop.set_default_executor(ThreadPoolExecutor(_NUM_THREADS))
    serving = loop.create_task(runner.serve())
    while not serving.done():
        with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a task of the environment, which has failed
            loop.run_until_complete(serving)
