"""The sandbox of v1 agents: each rollout's commands and files are in a sandbox session of this machine."""

import base64
import builtins
from collections.abc import Collection
from dataclasses import replace

from prime_rl.configs.environment import EnvConfig
from prime_rl.configs.known_harnesses import HARNESS_FOLDER
from prime_rl.rollouts.separate.values import BoxError
from prime_rl_sandbox import execution
from prime_rl_sandbox.execution import ExecutionResult, SandboxLimits, Verdict, current_settings
from prime_rl_sandbox.session import Session
from prime_rl_sandbox.shared_sandbox import SharedSandbox

_EXIT_TIMEOUT = 124
"""Exit code of a command that took too long, as of the program `timeout`."""
_PART_BYTES = 2**20
"""Size of the parts in which files are written and read."""
_HELPERS = '''
def _protect():
    """Deny the programs of the session the descriptors of this process, with which they could fake results."""
    import ctypes
    if ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) != 0:
        raise OSError("prctl")

def _run(argv, env, max_bytes):
    """Run a program, print the start of its output, and return its exit code."""
    import errno, os, signal, subprocess, sys, tempfile
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            env, stdin = {**os.environ, **env}, subprocess.DEVNULL
            process = subprocess.Popen(argv, env=env, stdin=stdin, stdout=out, stderr=err, start_new_session=True)
        except (OSError, ValueError) as error:
            sys.stderr.write(f"{argv[0]}: {error}\\n")
            codes = {errno.ENOENT: 127, errno.EACCES: 126, errno.ENOEXEC: 126}  # as of shells; others may pass
            return codes.get(getattr(error, "errno", None), 1)
        try:
            while process.returncode is None:  # this is process 1, so it also waits for what programs have left
                pid, status = os.waitpid(-1, 0)
                if pid == process.pid:
                    process.returncode = os.waitstatus_to_exitcode(status)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            for file, target in ((out, sys.stdout), (err, sys.stderr)):
                file.seek(0)
                target.buffer.write(file.read(max_bytes))
                target.buffer.flush()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode

def _read(path, offset, size):
    """Print a part of a file in base64, and return the size of the file."""
    import base64, os, sys
    with open(path, "rb") as file:
        file.seek(offset)
        sys.stdout.write(base64.b64encode(file.read(size)).decode())
        return os.fstat(file.fileno()).st_size

def _write(path, data, mode):
    """Write or append a part of a file, which is given in base64."""
    import base64, linecache, os
    linecache.clearcache()
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, mode) as file:
        file.write(base64.b64decode(data))

_protect()
'''

BOX_FOLDERS = ("/app", "/tests", "/logs")
"""Folders that images for agents have, of Terminal-Bench and others; each box has its own, empty ones."""

shared_sandbox = SharedSandbox(folders=BOX_FOLDERS)
"""Runs the sessions of all agents of this worker."""


def agent_limits() -> SandboxLimits:
    """Return the run's limits, raised to what the programs of agents need, such as Node.js."""
    limits = current_settings().limits
    return replace(
        limits,
        memory_bytes=max(limits.memory_bytes, 4 * 2**30),
        num_processes=max(limits.num_processes, 256),
        num_open_files=max(limits.num_open_files, 1024),
        disk_bytes=max(limits.disk_bytes, 2**30),
        num_files=max(limits.num_files, 2**16),
        shared_memory_bytes=max(limits.shared_memory_bytes, 64 * 2**20),
        limits_address_space=False,
    )


def box_sandbox(config: EnvConfig) -> SharedSandbox:
    """Return what runs the boxes of an environment."""
    if not config.program:
        return shared_sandbox
    paths = current_settings().paths
    if config.harness and HARNESS_FOLDER.is_dir():
        paths = tuple(dict.fromkeys((*paths, HARNESS_FOLDER)))
    return SharedSandbox(limits=agent_limits(), num_warm=2, folders=BOX_FOLDERS, paths=paths)


class AgentBox:
    """The sandbox session of one agent: empty folders, programs of /usr, no network, no environment of the host.

    It starts with the first command or file, so an agent that only chats needs no sandbox. Programs see neither this
    process nor other rollouts. Each command has the run's `sandbox.command_timeout_seconds`.
    """

    def __init__(self, sandbox: SharedSandbox = shared_sandbox) -> None:
        """Use a sandbox, which runs other agents too."""
        self._sandbox = sandbox
        self._session: Session | None = None

    async def run(self, argv: list[str], env: dict[str, str], timeout_seconds: float | None) -> tuple[int, str, str]:
        """Run a program; return its exit code, stdout and stderr.

        Raises:
            BoxError: the session has ended or failed.
        """
        max_bytes = self._sandbox.limits.output_bytes // 2
        seconds = timeout_seconds or current_settings().command_timeout_seconds
        result = await self._call(f"_run({list(argv)!r}, {env!r}, {max_bytes})", seconds)
        result = result.printable
        if result.verdict is Verdict.TIMEOUT:
            return _EXIT_TIMEOUT, result.stdout, f"the command took longer than {seconds:g} s"
        self._check(result)
        return int(result.value or 1), result.stdout, result.stderr

    async def read(self, path: str) -> bytes:
        """Return a file. Raises OSError if there is no such file, or BoxError."""
        step = min(_PART_BYTES, self._sandbox.limits.output_bytes // 2)
        content, size = b"", 1
        while len(content) < size:
            result = await self._call(f"_read({path!r}, {len(content)}, {step})")
            self._check(result, path)
            part, size = base64.b64decode(result.stdout), int(result.value or 0)
            if not part:
                break
            content += part
        return content

    async def write(self, path: str, data: bytes) -> None:
        """Write a file.

        Raises:
            OSError: the path cannot be written, or the disk of the session is full.
            BoxError: the session has ended or failed.
        """
        for start in range(0, max(1, len(data)), _PART_BYTES):
            part = base64.b64encode(data[start : start + _PART_BYTES])
            self._check(await self._call(f"_write({path!r}, {part!r}, {'ab' if start else 'wb'!r})"), path)

    async def forward(self, ports: Collection[int]) -> None:
        """Let its programs connect to these TCP ports of 127.0.0.1 on this machine. Raises BoxError."""
        try:
            await (await self._open()).forward(ports)
        except execution.SandboxError as error:
            raise BoxError(str(error)) from None

    async def close(self) -> None:
        """End the session and all programs in it."""
        session, self._session = self._session, None
        if session is not None:
            await session.__aexit__(None, None, None)

    async def _open(self) -> Session:
        if self._session is None:
            try:
                sandbox = await self._sandbox.open()
                self._session = await sandbox.session().__aenter__()
            except (execution.SandboxError, execution.SandboxConfigError) as error:
                raise BoxError(str(error)) from None
            self._check(await self._session.run(_HELPERS))
        return self._session

    async def _call(self, code: str, timeout_seconds: float | None = None) -> ExecutionResult:
        return await (await self._open()).run(code, timeout=timeout_seconds)

    def _check(self, result: ExecutionResult, path: str | None = None) -> None:
        if result.ok:
            return
        reason = result.stderr.strip().rpartition("\n")[2]
        kind = getattr(builtins, reason.partition(":")[0], None)
        if path is not None and isinstance(kind, type) and issubclass(kind, OSError):
            raise kind(f"{path}: {reason.partition(':')[2].strip()}")
        raise BoxError(f"the sandbox of the rollout failed ({result.verdict}): {reason}")
