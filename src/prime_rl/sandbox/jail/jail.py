"""One jail on the side of the host: starts bubblewrap, hands each request to it, replaces nothing by itself."""

import asyncio
import base64
import json
import os
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from prime_rl.core.errors import ConfigError
from prime_rl.sandbox.execution import SandboxLimits
from prime_rl.sandbox.jail.control_group import ControlGroup, create_control_group

_HEADER = struct.Struct(">I")
_MAX_FRAME_BYTES = 256 * 2**20
_START_TIMEOUT_SECONDS = 60.0
_STOP_TIMEOUT_SECONDS = 5.0
JAIL_FILES = ("jail_server.py", "jail_supervisor.py", "jail_child.py", "jail_program.py", "jail_files.py")
JAIL_FOLDER = Path(__file__).parent


class JailStartError(ConfigError):
    """A jail did not start; the message is that of bubblewrap or of the kernel."""


class JailLostError(Exception):
    """A jail, or the supervisor of an execution, ended before it answered."""


class JailProcess:
    """A running jail.

    Attributes:
        num_running: executions and sessions in it.
        control_group: limits all of it together; None where this is not possible.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        errors: IO[bytes],
        control_group: ControlGroup | None = None,
    ) -> None:
        self._process, self._control, self._errors = process, control, errors
        self.control_group = control_group
        self.num_running = 0

    @property
    def pid(self) -> int:
        """Process id of bubblewrap."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the jail runs."""
        return self._process.poll() is None

    def connect(self) -> "JailConnection":
        """Return a connection to a prepared child, which waits for its request.

        Raises:
            JailLostError: the jail has ended.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            socket.send_fds(self._control, [b"r"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise JailLostError(f"the jail has ended: {error}") from None
        finally:
            theirs.close()
        return JailConnection(ours)

    async def wait_until_ready(self, probe: Mapping[str, Any]) -> None:
        """Run a first request.

        Raises:
            JailStartError: the jail ended, or did not answer.
        """
        try:
            async with asyncio.timeout(_START_TIMEOUT_SECONDS):
                await self.connect().exchange(probe)
        except (JailLostError, TimeoutError):
            self.kill()
            raise JailStartError(self.read_errors() or "the jail did not answer") from None

    def read_errors(self) -> str:
        """Return the last line that bubblewrap or the fork server wrote to stderr."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._errors.seek(0)
        lines = self._errors.read()[-4096:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def kill(self) -> None:
        """End the jail and everything in it."""
        self._process.kill()
        self._control.close()

    async def close(self) -> None:
        """End the jail: its server exits when the socket is closed, and the kernel ends the processes in it."""
        self._control.close()
        try:
            await asyncio.to_thread(self._process.wait, _STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(self._process.wait)
        self._errors.close()
        deadline = time.monotonic() + _STOP_TIMEOUT_SECONDS
        while self.control_group is not None and not self.control_group.remove() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)  # the end of the last process in it sends no event


class JailConnection:
    """A connection to one supervised child: JSON objects, each with its length before it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send an object. Raises JailLostError."""
        payload = json.dumps(message).encode()
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, _HEADER.pack(len(payload)) + payload)
        except OSError as error:
            raise JailLostError(str(error)) from None

    async def exchange(self, message: Mapping[str, Any]) -> None:
        """Send an object, wait for the answer and close the connection. Raises JailLostError."""
        try:
            await self.send(message)
            await self.receive()
        finally:
            self.close()

    async def receive(self) -> dict[str, Any]:
        """Return the next object. Raises JailLostError."""
        (size,) = _HEADER.unpack(await self._read(_HEADER.size))
        if size > _MAX_FRAME_BYTES:
            raise JailLostError("the answer is too large")
        message = json.loads(await self._read(size))
        if not isinstance(message, dict):
            raise JailLostError("the answer is damaged")
        return message

    async def _read(self, size: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < size:
            try:
                chunk = await loop.sock_recv(self._socket, min(size - len(data), 2**20))
            except OSError as error:
                raise JailLostError(str(error)) from None
            if not chunk:
                raise JailLostError("the execution was lost")
            data += chunk
        return bytes(data)

    def close(self) -> None:
        """Close the connection, which ends the execution."""
        self._socket.close()


def encode_files(files: Mapping[str, str | bytes]) -> dict[str, str]:
    """Return contents in base64."""
    return {
        name: base64.b64encode(content.encode() if isinstance(content, str) else content).decode()
        for name, content in files.items()
    }


def decode_files(files: Mapping[str, str]) -> dict[str, bytes]:
    """Return contents from base64."""
    return {name: base64.b64decode(content) for name, content in files.items()}


def start_jail(
    wrapper: Sequence[str],
    interpreter: Path,
    limits: SandboxLimits,
    *,
    user: int | None,
    seccomp: bytes | None,
    num_warm: int,
    preload: Sequence[str],
    paths: Sequence[Path],
    jail_memory_bytes: int | None = None,
    server: Path = JAIL_FOLDER / JAIL_FILES[0],
    server_config: Mapping[str, Any] = MappingProxyType({}),
) -> JailProcess:
    """Start a jail.

    Args:
        wrapper: the command line of bubblewrap; empty to start the fork server without isolation.
        user: user and group id of the jail; None keeps this process's.
        seccomp: filter program of the executions; None without isolation.
        num_warm: prepared children.
        preload: modules that the fork server imports once.
        paths: folders on the module path of the executions.
        jail_memory_bytes: memory of the whole jail, where control groups are available.
        server: the program of the fork server, without isolation.
        server_config: further values for it.
    """
    control, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    isolated = bool(wrapper)
    config = {
        **asdict(limits),
        "control_fd": inside.fileno(),
        "isolated": isolated,
        "num_warm": num_warm,
        "preload": list(preload),
        "paths": [str(path) for path in paths],
        "seccomp_path": "/jail/filter.bpf" if isolated else None,
        "component": None,
        "child_user": None,
        "read_only_root": False,
        **server_config,
    }
    data: list[IO[bytes]] = []
    arguments = list[str]()
    if isolated:
        server = Path("/jail") / JAIL_FILES[0]
        contents = {name: (JAIL_FOLDER / name).read_bytes() for name in JAIL_FILES} | {"filter.bpf": seccomp or b""}
        for name, content in contents.items():
            data.append(_open_data(content))
            arguments += ["--ro-bind-data", str(data[-1].fileno()), f"/jail/{name}"]
        arguments += ["--remount-ro", "/", "--"]
    program = [str(interpreter), "-I", "-S", "-X", "utf8", str(server), json.dumps(config)]
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the jail
    group = create_control_group(jail_memory_bytes, user) if jail_memory_bytes is not None else None
    enter = [] if group is None else group.enter_command(user)
    user = user if group is None else None
    try:
        process = subprocess.Popen(
            [*enter, *wrapper, *arguments, *program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={},
            cwd="/",
            pass_fds=(inside.fileno(), *(file.fileno() for file in data)),
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=[] if user is not None else None,
        )
    except OSError as error:
        control.close()
        raise JailStartError(str(error)) from None
    finally:
        inside.close()
        for file in data:
            file.close()
    return JailProcess(process, control, errors, group)


def _open_data(content: bytes) -> IO[bytes]:
    file = os.fdopen(os.memfd_create("jail"), "w+b")
    file.write(content)
    file.seek(0)
    return file
