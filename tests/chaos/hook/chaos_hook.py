"""Kills a process of a run at a chosen operation, without changes to the program.

A fault strikes once: its marker is created with O_EXCL before the signal, so that a restarted or concurrent process
continues. Only the standard library is imported, because this runs in every process.

    CHAOS_DIR   folder of the session: armed.json, fired_<id>.json, pids/<role>
    CHAOS_RUN   the run directory; operations elsewhere do not count
    CHAOS_ENGINE  if set, the program that replaces `inference`

An operation is a system call that changes the run directory (mkdir, create, write, fsync, rename), or a call of one of
`CALLS`. `moment` is before, after, or, for a write, half: then half of the bytes are written.
"""

import functools
import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

CALLS = {
    "prime_rl.rollouts.clients.inference_client": {
        "InferenceClient.stage": "client.stage",
        "InferenceClient.load": "client.switch",
        "InferenceClient.reset": "client.reset",
        "InferenceClient.generate": "client.generate",
    },
    "prime_rl.inference.policy.policy_manager": {
        "PolicyManager.stage": "server.stage",
        "PolicyManager.update": "server.switch",
        "PolicyManager.reload": "server.reset",
    },
}
"""Asynchronous methods by module, and the name of the operation."""

_MODULES = {
    "prime_rl.entrypoints.rl": "rl",
    "prime_rl.entrypoints.orchestrator": "orchestrator",
    "prime_rl.entrypoints.inference": "inference",
    "prime_rl.rollouts.workers.fork_server": "forkserver",
    "prime_rl.trainer.rl.train": "rank",
    "prime_rl.trainer.torchrun": "torchrun",
}
_CHILDREN = {"forkserver": "worker", "inference": "engine", "engines": "engine"}
"""Roles of forked processes. An engine is forked by the server, or by multiprocessing."""


class _State:
    """State of this process."""

    role = "other"
    directory = ""
    run = ""
    seen: tuple[int, int] | None = None
    armed: dict[str, Any] | None = None
    pattern: "re.Pattern[str]" = re.compile("")
    reached = 0


_state = _State()
_inside = threading.local()
_lock = threading.Lock()


def install() -> None:
    """Watch this process, if it belongs to a session."""
    _state.directory, _state.run = os.environ.get("CHAOS_DIR", ""), os.environ.get("CHAOS_RUN", "")
    if not _state.directory:
        return
    _state.role = role_of(sys.orig_argv, os.environ)
    engine = os.environ.get("CHAOS_ENGINE")
    if _state.role == "inference" and engine and sys.orig_argv[1] != engine:
        config = sys.orig_argv[sys.orig_argv.index("@") + 1]
        os.execv(sys.executable, [sys.executable, engine, config])
    if _state.role == "other":
        return
    _register()
    os.register_at_fork(after_in_child=_forked)
    sys.addaudithook(_on_audit)
    _wrap_calls()
    os.rename = _around("rename", os.rename, lambda source, target, **_: target)
    os.replace = _around("rename", os.replace, lambda source, target, **_: target)
    os.mkdir = _around("mkdir", os.mkdir, lambda path, *_, **__: path)
    os.fsync = _around("fsync", os.fsync, _path_of)
    os.write = _write(os.write)


def role_of(argv: list[str], environ: Any) -> str:
    """The role of the process with these arguments; `other` for processes without faults."""
    if "-m" in argv:
        role = _MODULES.get(argv[argv.index("-m") + 1], "other")
        return f"rank{environ.get('RANK', '0')}" if role == "rank" else role
    program = argv[1] if len(argv) > 1 else ""
    if program and program == environ.get("CHAOS_ENGINE"):
        return "inference"
    if os.path.basename(program) == "rl":
        return "rl"
    return "engines" if any("multiprocessing.forkserver" in argument for argument in argv) else "other"


def reach(operation: str, where: str, moment: str, last: Callable[[], Any] = lambda: None) -> None:
    """Report that this process is at an operation; a fault there kills it.

    Args:
        operation: mkdir, create, write, fsync, rename or call.
        where: path within the run directory, or name of the call.
        moment: before, half or after.
        last: called before the kill, if the fault strikes here.
    """
    if getattr(_inside, "busy", False):
        return
    _inside.busy = True
    try:
        fault = _read_armed()
        if fault is None or (fault["process"], fault["operation"], fault["moment"]) != (_state.role, operation, moment):
            return
        if not _state.pattern.fullmatch(where):
            return
        with _lock:
            _state.reached += 1
            if _state.reached == fault["count"]:
                _strike(fault, where, last)
    finally:
        _inside.busy = False


def _strike(fault: dict[str, Any], where: str, last: Callable[[], Any]) -> None:
    victim = fault["victim"]
    own = victim in (_state.role, "self")
    pid = os.getpid() if own else int(_read(f"{_state.directory}/pids/{victim}") or 0)
    if not pid:
        return
    record = {"time": time.time(), "by": os.getpid(), "victim": victim, "pid": pid, "where": where}
    try:
        descriptor = os.open(f"{_state.directory}/fired_{fault['id']}.json", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    _real_write(descriptor, json.dumps(record).encode())
    os.close(descriptor)
    last()
    os.kill(pid, signal.SIGKILL)


def _read_armed() -> dict[str, Any] | None:
    """The armed fault; read again if the file has changed."""
    path = f"{_state.directory}/armed.json"
    try:
        stat = os.stat(path)
    except OSError:
        return None
    version = (stat.st_mtime_ns, stat.st_ino)
    if version != _state.seen:
        with _lock:
            _state.armed, _state.reached = json.loads(_read(path) or "null"), 0
            _state.pattern = re.compile(_state.armed["where"] if _state.armed else "")
            _state.seen = version
    return _state.armed


def _read(path: str) -> str:
    before, _inside.busy = getattr(_inside, "busy", False), True
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
    finally:
        _inside.busy = before


def _register() -> None:
    """Write the process id, so that other processes can kill this one."""
    before, _inside.busy = getattr(_inside, "busy", False), True
    try:
        os.makedirs(f"{_state.directory}/pids", exist_ok=True)
        temporary = f"{_state.directory}/pids/.{os.getpid()}"
        with open(temporary, "w") as file:
            file.write(str(os.getpid()))
        os.replace(temporary, f"{_state.directory}/pids/{_state.role}")
    finally:
        _inside.busy = before


def _forked() -> None:
    _state.role = _CHILDREN.get(_state.role, "other")
    _state.reached = 0
    if _state.role != "other":
        _register()


def _relative(path: Any) -> str | None:
    """The path within the run directory; None if it is elsewhere."""
    try:
        whole = os.path.abspath(os.fsdecode(path))
    except TypeError:
        return None
    return whole[len(_state.run) + 1 :] if whole.startswith(_state.run + os.sep) else None


def _path_of(descriptor: Any, *_: Any, **__: Any) -> str:
    number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


def _around(operation: str, call: Callable[..., Any], path_of: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        where = _relative(path_of(*args, **kwargs))
        if where is None:
            return call(*args, **kwargs)
        reach(operation, where, "before")
        result = call(*args, **kwargs)
        reach(operation, where, "after")
        return result

    return wrapped


def _write(call: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(call)
    def wrapped(descriptor: int, data: Any) -> int:
        where = _relative(_path_of(descriptor))
        if where is None:
            return call(descriptor, data)
        reach("write", where, "before")
        reach("write", where, "half", lambda: call(descriptor, memoryview(data)[: len(data) // 2]))
        written = call(descriptor, data)
        reach("write", where, "after")
        return written

    return wrapped


def _on_audit(event: str, args: tuple[Any, ...]) -> None:
    if event != "open" or getattr(_inside, "busy", False):
        return
    path, _, flags = args
    if isinstance(path, str | bytes | os.PathLike) and flags & (os.O_WRONLY | os.O_RDWR):
        where = _relative(path)
        if where is not None:
            reach("create", where, "before")


def _wrap_calls() -> None:
    """Wrap the methods of `CALLS` as soon as their modules are imported."""
    sys.meta_path.insert(0, _Finder())


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in CALLS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, CALLS[name])  # type: ignore[assignment]
        return spec


class _Loader:
    def __init__(self, loader: Any, methods: dict[str, str]) -> None:
        self._loader, self._methods = loader, methods

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        for path, operation in self._methods.items():
            owner, method = path.split(".")
            kind = getattr(module, owner)
            setattr(kind, method, _around_call(getattr(kind, method), operation))


def _around_call(call: Callable[..., Any], operation: str) -> Callable[..., Any]:
    @functools.wraps(call)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        reach("call", operation, "before")
        result = await call(*args, **kwargs)
        reach("call", operation, "after")
        return result

    return wrapped


_real_write = os.write
