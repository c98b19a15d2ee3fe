"""The self-test at the start of a sandbox: code inside tries to read, write, connect and signal outside."""

import asyncio
import json
import os
import secrets
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from prime_rl.core.errors import ConfigError
from prime_rl.sandbox.execution import ExecutionResult, Verdict

DEFAULT_PRELOAD = (
    "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json",
    "math", "operator", "random", "re", "statistics", "string", "sys", "time", "typing",
)  # fmt: skip

_ATTEMPTS = """
import json, os, sys
try:
    import ctypes, socket
except ImportError:  # WebAssembly has neither, so what needs them fails with a NameError
    pass
secret_path, port, host_pid, folder = json.loads(sys.stdin.read())
escaped = []
def attempt(name, function):
    try:
        if function() is not False:
            escaped.append(name)
    except (OSError, ValueError, KeyError, NameError, AttributeError):
        pass
def write(path):
    with open(path, "w") as file:
        file.write("x")
def unshare():
    return ctypes.CDLL(None).unshare(0x10000000) == 0
def socket_of_virtual_machine():
    socket.socket(40, socket.SOCK_STREAM)
attempt("read a file of the host", lambda: open(secret_path).read())
attempt("write to a folder of the host", lambda: write(os.path.join(folder, "x")))
attempt("write to /dev", lambda: write("/dev/x"))
attempt("write to /usr", lambda: write("/usr/x"))
attempt("connect to the host", lambda: socket.create_connection(("127.0.0.1", port), 1))
attempt("open a vsock socket", socket_of_virtual_machine)
attempt("signal a process of the host", lambda: os.kill(host_pid, 0) if host_pid > 400 else False)
attempt("see processes of the host", lambda: len([x for x in os.listdir("/proc") if x.isdigit()]) > 1)
attempt("create a user namespace", unshare)
attempt("read the environment of the host", lambda: os.environ["PRIME_RL_SANDBOX_SECRET"])
attempt("run as root", lambda: os.getuid() == 0)
print(json.dumps(escaped))
with open("/tmp/left_behind", "w") as file:
    file.write("x")
"""
_SECOND_RUN = "import os; print(os.path.exists('/tmp/left_behind'))"


async def check_isolation(run: Callable[..., Awaitable[ExecutionResult]]) -> None:
    """Try to escape from a sandbox.

    Args:
        run: `Sandbox.run`.

    Raises:
        ConfigError: an attempt succeeded, or the test could not be run.
    """
    escaped = await _attempt_escapes(run)
    second = await run(_SECOND_RUN)
    if second.stdout.strip() != "False":
        escaped.append("see files of an earlier execution")
    if escaped:
        raise ConfigError(
            f"the sandbox does not isolate code on this host, which could {', '.join(escaped)}; "
            "run `uv run doctor --sandbox` and report this"
        )


async def _attempt_escapes(run: Callable[..., Awaitable[ExecutionResult]]) -> list[str]:
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as server:
        folder = Path(name)
        folder.chmod(0o777)
        secret = folder / "secret"
        await asyncio.to_thread(secret.write_text, secrets.token_hex())
        secret.chmod(0o644)
        facts = [str(secret), server.getsockname()[1], os.getpid(), name]
        result = await run(_ATTEMPTS, stdin=json.dumps(facts))
    if result.verdict is not Verdict.OK:
        raise ConfigError(
            f"the self-test of the sandbox failed ({result.verdict}); run `uv run doctor --sandbox`: "
            f"{result.stderr.strip()[-300:]}"
        )
    return list(json.loads(result.stdout))
