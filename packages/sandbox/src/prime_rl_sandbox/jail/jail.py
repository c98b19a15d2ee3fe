"""One jail on the side of the host: starts bubblewrap, hands each request to it, replaces nothing by itself.

Each jail has a control group, where this process may create one: a limit of memory and processes for all of it. The
fork server creates a group of memory in it for each execution, so that one that needs too much is ended alone.
Available as root, in a container with a writable hierarchy, and where systemd delegates one to the user. Elsewhere the
limits of each process remain.
"""

import asyncio
import base64
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from prime_rl_sandbox.execution import SandboxConfigError, SandboxLimits

_MAX_FRAME_BYTES = 256 * 2**20
_HEADER = struct.Struct(">I")
_START_TIMEOUT_SECONDS = 60.0
_STOP_TIMEOUT_SECONDS = 5.0
_PRELOAD_FAILED = 3
"""Exit code of the fork server, as in `jail_server`."""
JAIL_FILES = ("jail_server.py", "jail_supervisor.py", "jail_child.py", "jail_files.py", "jail_ports.py")
JAIL_FOLDER = Path(__file__).parent
_HOSTS = b"127.0.0.1 localhost sandbox\n::1 localhost\n"


_PREFIX = "prime_rl_jail_"
_SERVER = "server"
_MAX_PROCESSES = 8192
_ENTER = 'for folder in $1; do echo $$ > "$folder/cgroup.procs" || exit 1; done; shift; exec "$@"'


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A group, as one folder per hierarchy, that of memory first; `version` is 1 or 2."""

    folders: tuple[Path, ...]
    version: int

    def enter_command(self, user: int | None) -> list[str]:
        """Return the start of a command line that enters the group, and then becomes `user` if that is not None."""
        entered = [self.folders[0] / _SERVER] if self.version == 2 else self.folders
        command = ["/bin/sh", "-c", _ENTER, "sh", " ".join(map(str, entered))]
        if user is not None:
            identity = [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
            command += [str(shutil.which("setpriv")), *identity, "--"]
        return command

    def reached_its_limit(self) -> bool:
        """Return whether all processes together have ever needed more memory than their limit."""
        if self.version == 1:
            return _read(self.folders[0] / "memory.failcnt").strip() not in ("", "0")
        events = _read(self.folders[0] / "memory.events.local").splitlines()
        return any(line.startswith("oom ") and line != "oom 0" for line in events)

    def remove(self) -> bool:
        """Remove the group, after its processes have ended. Return False if the kernel still has one of them."""
        for folder in self.folders:
            with suppress(OSError):
                for inside in filter(Path.is_dir, folder.iterdir()):
                    inside.rmdir()
                folder.rmdir()
        return not any(folder.exists() for folder in self.folders)


def create_control_group(memory_bytes: int, user: int | None) -> ControlGroup | None:
    """Return a new group with a limit of memory, or None if this process cannot create one.

    Args:
        user: the user that a command in the group becomes.
    """
    if user is not None and shutil.which("setpriv") is None:
        return None
    parents = _find_parents()
    if "" in parents:
        limits = {"memory.max": memory_bytes, "memory.swap.max": 0, "pids.max": _MAX_PROCESSES}
        for parent in (parents[""], parents[""].parent):
            if (folder := _create(parent, limits, user, version=2)) is not None:
                return ControlGroup((folder,), 2)
        return None
    folders = list[Path]()
    for controller, limits in (
        ("memory", {"memory.limit_in_bytes": memory_bytes}),
        ("pids", {"pids.max": _MAX_PROCESSES}),
    ):
        folder = _create(parents[controller], limits, user, version=1) if controller in parents else None
        if folder is None:
            ControlGroup(tuple(folders), 1).remove()
            return None
        folders.append(folder)
    return ControlGroup(tuple(folders), 1)


def _find_parents() -> dict[str, Path]:
    """Return the folders of this process's groups by controller; "" is the second version with memory and processes."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return {}
    return find_group_folders(groups, mounts)


def find_group_folders(groups: list[list[str]], mounts: list[list[str]]) -> dict[str, Path]:
    """Return folders by controller, from the fields of /proc/self/cgroup and /proc/self/mountinfo."""
    found: dict[str, Path] = {}
    for mount in mounts:
        kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
        for _, names, path in groups:
            controllers = names.split(",")
            if (kind == "cgroup2" and names == "") or (kind == "cgroup" and set(controllers) <= set(options)):
                root, folder = mount[3], Path(mount[4])
                inside = path.removeprefix(root.rstrip("/")) if path.startswith(root.rstrip("/")) else ""
                found |= dict.fromkeys(controllers, folder / inside.lstrip("/"))
    if "" in found and "memory" not in _read(found[""] / "cgroup.controllers").split():
        del found[""]
    return found


def _create(parent: Path, limits: Mapping[str, int], user: int | None, *, version: int) -> Path | None:
    """Create a group in which `user` can create others."""
    folder = parent / f"{_PREFIX}{os.getpid()}_{os.urandom(4).hex()}"
    try:
        _remove_left_behind(parent)
        if version == 2 and "memory" not in _read(parent / "cgroup.subtree_control").split():
            (parent / "cgroup.subtree_control").write_text("+memory +pids")
        folder.mkdir()
        for name, value in limits.items():
            if (folder / name).exists():
                (folder / name).write_text(str(value))
        delegated = [folder]
        if version == 2:  # only groups without processes have others with limits in them
            (folder / _SERVER).mkdir()
            (folder / "cgroup.subtree_control").write_text("+memory")
            delegated += [folder / "cgroup.procs", folder / _SERVER / "cgroup.procs"]
        for path in delegated:
            os.chown(path, -1 if user is None else user, -1)
    except OSError:
        ControlGroup((folder,), version).remove()
        return None
    return folder


def _remove_left_behind(parent: Path) -> None:
    """Remove the groups of processes that were killed; one with processes in it stays."""
    for folder in parent.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("_")[0]
        if not Path("/proc", owner).exists():
            ControlGroup((folder,), 2).remove()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


class JailStartError(SandboxConfigError):
    """A jail did not start; the message is that of bubblewrap or of the kernel."""


class PreloadError(JailStartError):
    """A module of `preload` cannot be imported in the jail."""


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
        self._killed = False

    @property
    def pid(self) -> int:
        """Process id of bubblewrap."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the jail's process runs and was not killed."""
        return not self._killed and self._process.poll() is None

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
            reason = self.read_errors()
            if self._process.poll() == _PRELOAD_FAILED:
                raise PreloadError(f"sandbox.preload: {reason}; see docs/sandbox.md, packages") from None
            self.kill()
            raise JailStartError(reason or "the jail did not answer") from None

    def read_errors(self) -> str:
        """Return the last line that bubblewrap or the fork server wrote to stderr."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._errors.seek(0)
        lines = self._errors.read()[-4096:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def kill(self) -> None:
        """End the jail and everything in it."""
        self._killed = True
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
        (size,) = _HEADER.unpack(await self._receive_exactly(_HEADER.size))
        if size > _MAX_FRAME_BYTES:
            raise JailLostError(f"the answer is too large: {size} bytes, more than {_MAX_FRAME_BYTES}")
        message = json.loads(await self._receive_exactly(size))
        if not isinstance(message, dict):
            raise JailLostError("the answer is damaged")
        return message

    async def _receive_exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = await asyncio.get_running_loop().sock_recv(self._socket, min(size - len(data), 2**20))
            except OSError as error:
                raise JailLostError(str(error)) from None
            if not part:
                raise JailLostError("the execution was lost")
            data += part
        return bytes(data)

    def close(self) -> None:
        """Close the connection, which ends the execution."""
        self._socket.close()


def encode_files(files: Mapping[str, str | bytes]) -> dict[str, str]:
    """Encode the contents of files in base64, for JSON."""
    return {
        name: base64.b64encode(content.encode() if isinstance(content, str) else content).decode()
        for name, content in files.items()
    }


def decode_files(files: Mapping[str, str]) -> dict[str, bytes]:
    """Decode the contents of files from base64."""
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
    folders: Sequence[str] = (),
    jail_memory_bytes: int | None = None,
) -> JailProcess:
    """Start a jail.

    Args:
        wrapper: the command line of bubblewrap; empty to start the fork server without isolation.
        user: user and group id of the jail; None keeps this process's.
        seccomp: filter program of the executions; None without isolation.
        num_warm: prepared children.
        preload: modules that the fork server imports once.
        paths: folders on the module path of the executions.
        folders: empty folders that executions can write to, besides /tmp.
        jail_memory_bytes: memory of the whole jail, where control groups are available.
    """
    control, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inherited = [_above_streams(inside.detach())]
    isolated = bool(wrapper)
    config = {
        **asdict(limits),
        "control_fd": inherited[0],
        "group": None,
        "isolated": isolated,
        "num_warm": num_warm,
        "preload": list(preload),
        "paths": [str(path) for path in paths],
        "folders": list(folders),
        "seccomp_path": "/jail/filter.bpf" if isolated else None,
        "read_only_root": False,
    }
    server, arguments = JAIL_FOLDER / JAIL_FILES[0], list[str]()
    if isolated:
        server = Path("/jail") / JAIL_FILES[0]
        contents = {name: (JAIL_FOLDER / name).read_bytes() for name in JAIL_FILES} | {"filter.bpf": seccomp or b""}
        for name, content in contents.items():
            inherited.append(_open_data(content))
            arguments += ["--ro-bind-data", str(inherited[-1]), f"/jail/{name}"]
        inherited.append(_open_data(_HOSTS))
        arguments += ["--ro-bind-data", str(inherited[-1]), "/etc/hosts"]
        arguments += ["--remount-ro", "/", "--"]
    group = create_control_group(jail_memory_bytes, user) if jail_memory_bytes is not None else None
    enter = [] if group is None else group.enter_command(user)
    if group is not None:
        inherited.append(_above_streams(os.open(group.folders[0], os.O_RDONLY | os.O_DIRECTORY)))
        config["group"] = {"fd": inherited[-1], "version": group.version}
    program = [str(interpreter), "-I", "-S", "-X", "utf8", str(server), json.dumps(config)]
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the jail
    user = user if group is None else None
    try:
        process = subprocess.Popen(
            [*enter, *wrapper, *arguments, *program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={},
            cwd="/",
            pass_fds=inherited,
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=[] if user is not None else None,
        )
    except OSError as error:
        control.close()
        raise JailStartError(str(error)) from None
    finally:
        for fd in inherited:
            os.close(fd)
    return JailProcess(process, control, errors, group)


def _open_data(content: bytes) -> int:
    fd = os.memfd_create("jail")
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
        file.seek(0)
    return _above_streams(fd)


def _above_streams(fd: int) -> int:
    """Return a descriptor that does not take the place of a stream, which this process may have closed."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)
