"""A jail in a remote machine, seen from the host: creates the machine, starts the gateway in it, relays connections.

The machine takes the place of bubblewrap. In it each execution has its own namespaces, limits and filter, as in a local
jail. All connections share the streams of one remote process.
"""

import asyncio
import base64
import importlib.util
import itertools
import json
import secrets
import shlex
import socket
import struct
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger

from prime_rl_sandbox.execution import SandboxConfigError, SandboxLimits
from prime_rl_sandbox.jail.bubblewrap import JAIL_UID, build_seccomp_filter
from prime_rl_sandbox.jail.jail import JAIL_FILES, JAIL_FOLDER, JailConnection, JailLostError, JailStartError
from prime_rl_sandbox.jail.jail_pool import StartJail

_HEADER = struct.Struct(">II")
_MAX_FRAME_BYTES = 2**18
_START_TIMEOUT_SECONDS = 600.0
_STOP_TIMEOUT_SECONDS = 20.0
"""Less than `env.cleanup_seconds`: the worker must log the warning before it is killed."""
_LAST_ERRORS_SECONDS = 5.0
_LIFETIME_MINUTES = 24 * 60
_CPU_CORES = 2
_BOOTSTRAP = """
import base64, json, os, sys, tempfile
folder = tempfile.mkdtemp()
os.chmod(folder, 0o755)
with open(0, "rb", 0, closefd=False) as stdin:  # unbuffered: what follows is for the gateway
    bundle = json.loads(base64.b64decode(stdin.readline()))
for name, content in bundle["files"].items():
    with open(os.path.join(folder, name), "wb") as file:
        file.write(base64.b64decode(content))
sys.path.insert(0, folder)
import remote_gateway
remote_gateway.main(folder, bundle["config"])
"""


def build_prime_start(
    limits: SandboxLimits,
    *,
    num_warm: int,
    preload: Sequence[str],
    folders: Sequence[str] = (),
    image: str,
    memory_bytes: int,
) -> StartJail:
    """Return a function that starts a jail in a remote machine.

    Args:
        limits: of each execution.
        num_warm: prepared children.
        preload: modules that the fork server imports once.
        folders: empty folders that executions can write to, besides /tmp.
        image: container image with `python3` from which the machine is made.
        memory_bytes: memory of the machine.

    Raises:
        SandboxConfigError: the client library or its key is missing, or libseccomp.
    """
    check_prime()
    config = {
        **asdict(limits),
        "isolated": True,
        "read_only_root": True,
        "num_warm": num_warm,
        "preload": list(preload),
        "paths": [],
        "folders": list(folders),
        "group": None,
        "jail_uid": JAIL_UID,
    }
    contents = {name: (JAIL_FOLDER / name).read_bytes() for name in JAIL_FILES}
    contents["remote_gateway.py"] = Path(__file__).with_name("remote_gateway.py").read_bytes()
    contents["filter.bpf"] = build_seccomp_filter()
    files = {name: base64.b64encode(content).decode() for name, content in contents.items()}
    bundle = base64.b64encode(json.dumps({"config": config, "files": files}).encode()) + b"\n"
    return partial(PrimeJail, bundle, image, memory_bytes)


def check_prime() -> None:
    """Check that the client library and a key are there.

    Raises:
        SandboxConfigError: one of them is missing.
    """
    if importlib.util.find_spec("prime_sandboxes") is None:
        raise SandboxConfigError(
            "the sandbox backend prime needs the package prime-sandboxes; install it: uv sync --extra prime, or "
            "pip install prime-sandboxes"
        )
    from prime_sandboxes.core.config import Config

    if not Config().api_key:
        raise SandboxConfigError("the sandbox backend prime needs a key; set PRIME_API_KEY, or run `prime login`")


class PrimeJail:
    """A jail in a remote machine, which `wait_until_ready` creates.

    Attributes:
        num_running: executions and sessions in it.
        control_group: always None: the machine has its own memory.
    """

    control_group = None

    def __init__(self, bundle: bytes, image: str, memory_bytes: int) -> None:
        self._bundle, self._image, self._memory_bytes = bundle, image, memory_bytes
        self.num_running = 0
        self._client: Any = None
        self._process: Any = None
        self._creation: asyncio.Future[Any] | None = None
        self._machine: str | None = None
        self._ended = False
        self._errors = bytearray()
        self._failure = ""
        self._numbers = itertools.count()
        self._sockets: dict[int, tuple[socket.socket, asyncio.Queue[bytes]]] = {}
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error_reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Process id of the gateway in the machine; 0 before it has started."""
        return 0 if self._process is None else int(self._process.pid)

    @property
    def alive(self) -> bool:
        """Whether the jail on the remote machine runs."""
        return self._process is not None and not self._ended

    async def wait_until_ready(self, probe: Mapping[str, Any]) -> None:
        """Create the machine, start the jail in it, and run a first request.

        Raises:
            JailStartError: the service refused, or the jail did not start.
        """
        from prime_sandboxes import APIError, SandboxNotRunningError

        try:
            async with asyncio.timeout(_START_TIMEOUT_SECONDS):
                await self._start_process()
                await self.connect().exchange(probe)
        except (APIError, SandboxNotRunningError, JailLostError, TimeoutError) as error:
            if self._error_reader is not None:  # if it has ended, its stderr names the reason
                await asyncio.wait([self._error_reader], timeout=_LAST_ERRORS_SECONDS)
            raise JailStartError(
                f"the remote machine did not start a jail: {self.read_errors() or repr(error)}"
            ) from None

    async def _start_process(self) -> None:
        from prime_sandboxes import AsyncSandboxClient, CreateSandboxRequest

        self._client = AsyncSandboxClient()
        request = CreateSandboxRequest(
            name=f"prime-rl-{secrets.token_hex(4)}",
            docker_image=self._image,
            cpu_cores=_CPU_CORES,
            memory_gb=max(1, self._memory_bytes // 2**30),
            timeout_minutes=_LIFETIME_MINUTES,
            network_allowlist=[],
            labels=["prime-rl"],
        )
        self._creation = asyncio.ensure_future(self._client.create(request))
        self._machine = (await asyncio.shield(self._creation)).id
        await self._client.wait_for_creation(self._machine)
        command = f"exec python3 -I -S -u -c {shlex.quote(_BOOTSTRAP)}"
        self._process = await self._client.open_process(self._machine, command)
        self._outgoing.put_nowait(self._bundle)
        self._start_task(self._write())
        self._start_task(self._read())
        self._error_reader = self._start_task(self._collect_errors())

    def connect(self) -> JailConnection:
        """Return a connection to a prepared child, which waits for its request.

        Raises:
            JailLostError: the jail has ended.
        """
        if not self.alive:
            raise JailLostError(f"the remote jail has ended: {self.read_errors() or 'no message'}")
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        number = next(self._numbers) % 2**32
        self._sockets[number] = theirs, asyncio.Queue()
        self._start_task(self._relay(number, theirs))
        return JailConnection(ours)

    def read_errors(self) -> str:
        """Return the last line that the jail wrote to stderr, or how the connection to it failed."""
        lines = bytes(self._errors[-4096:]).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else self._failure

    def kill(self) -> None:
        """Stop using the jail; `close` deletes its machine."""
        self._ended = True
        for end, _ in self._sockets.values():
            with suppress(OSError):  # its relay has closed it
                end.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """Delete the machine and everything in it."""
        self.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        client, self._client = self._client, None
        if client is None:
            return
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_SECONDS):
                if self._machine is None and self._creation is not None:  # the request was sent before a cancellation
                    await asyncio.wait([self._creation])
                    if self._creation.exception() is None:
                        self._machine = self._creation.result().id
                if self._machine is not None:
                    await client.delete(self._machine)
                if self._process is not None:
                    await self._process.aclose()
                await client.aclose()
        except Exception as error:  # noqa: BLE001  # any failure of the service: the machine ends by itself later
            logger.warning("sandbox: remote machine {} was not deleted: {!r}", self._machine, error)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _relay(self, number: int, end: socket.socket) -> None:
        """Send what one connection writes, until it is closed, and hand to it what arrives for it."""
        loop = asyncio.get_running_loop()
        delivery = asyncio.create_task(_deliver(end, self._sockets[number][1]))
        try:
            while data := await loop.sock_recv(end, _MAX_FRAME_BYTES):
                self._outgoing.put_nowait(_HEADER.pack(number, len(data)) + data)
        except OSError:
            pass
        finally:
            self._outgoing.put_nowait(_HEADER.pack(number, 0))
            del self._sockets[number]
            delivery.cancel()
            await asyncio.wait([delivery])
            end.close()

    async def _write(self) -> None:
        """Send frames in their order, several in one message if they wait."""
        # Python 3.11: `asyncio.wait_for`, which the library uses, loses a cancellation at the moment of an answer.
        while not self._ended:
            data = await self._outgoing.get()
            while not self._outgoing.empty() and len(data) < _MAX_FRAME_BYTES:
                data += self._outgoing.get_nowait()
            try:
                for start in range(0, len(data), _MAX_FRAME_BYTES):
                    await self._process.write_stdin(data[start : start + _MAX_FRAME_BYTES])
            except Exception as error:  # noqa: BLE001  # any failure of the service ends the jail
                self._failure = repr(error)
                self.kill()
                return

    async def _read(self) -> None:
        """Queue what arrives for the connections, until the process ends."""
        buffer = bytearray()
        try:
            async for data in self._process.stdout:
                buffer += data
                while len(buffer) >= _HEADER.size:
                    number, size = _HEADER.unpack_from(buffer)
                    if size > _MAX_FRAME_BYTES:
                        raise JailLostError("a frame of the remote jail is damaged")
                    if len(buffer) < _HEADER.size + size:
                        break
                    content = bytes(buffer[_HEADER.size : _HEADER.size + size])
                    del buffer[: _HEADER.size + size]
                    if number in self._sockets:
                        self._sockets[number][1].put_nowait(content)
        except Exception as error:  # noqa: BLE001  # any failure of the service ends the jail
            self._failure = repr(error)
        finally:
            self.kill()

    async def _collect_errors(self) -> None:
        async for data in self._process.stderr:
            self._errors += data
            del self._errors[:-65536]


async def _deliver(end: socket.socket, queue: "asyncio.Queue[bytes]") -> None:
    """Write to a connection what arrives for it, until an empty part ends it: one that waits does not stop others."""
    with suppress(OSError):  # the host has closed the connection
        while content := await queue.get():
            await asyncio.get_running_loop().sock_sendall(end, content)
        end.shutdown(socket.SHUT_WR)
