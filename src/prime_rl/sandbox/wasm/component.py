"""Compiles the interpreter of the backend `wasm`, once per machine and version, into the user's cache."""

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from loguru import logger

from prime_rl.core.errors import ConfigError
from prime_rl.sandbox.execution import SandboxLimits
from prime_rl.sandbox.jail import jail_program
from prime_rl.sandbox.jail.bubblewrap import JAIL_UID, find_interpreter
from prime_rl.sandbox.jail.jail import start_jail
from prime_rl.sandbox.jail.jail_pool import StartJail

_FOLDER = Path(__file__).parent
_PACKAGES = ("wasmtime", "componentize-py")
_BUILD = "import componentize_py; componentize_py.script()"
_COMPILE = """
import pathlib, sys
from wasmtime import Engine
from wasmtime.component import Component
pathlib.Path(sys.argv[2]).write_bytes(Component.from_file(Engine(), sys.argv[1]).serialize())
"""


def build_wasm_start(limits: SandboxLimits, num_warm: int) -> StartJail:
    """Return a function that starts a fork server of interpreters in WebAssembly.

    Raises:
        ConfigError: the packages of the extra `wasm` are not installed.
    """
    user = JAIL_UID if os.getuid() == 0 else None
    wasmtime = importlib.util.find_spec("wasmtime")
    path = component_path()
    assert wasmtime is not None and wasmtime.origin is not None
    config = {
        "component": str(path),
        "wasmtime_folder": str(Path(wasmtime.origin).parents[1]),
        "child_user": user,
    }
    return partial(
        start_jail,
        [],
        find_interpreter(None),
        limits,
        user=None,
        seccomp=None,
        num_warm=num_warm,
        preload=(),
        paths=(),
        server=_FOLDER / "wasm_server.py",
        server_config=config,
    )


def component_path() -> Path:
    """Return the path of the compiled interpreter, which depends on its sources, on the packages, and on this machine.

    Raises:
        ConfigError: the packages of the extra `wasm` are not installed.
    """
    try:
        versions = [version(name) for name in _PACKAGES]
    except PackageNotFoundError as error:
        raise ConfigError(
            f"the sandbox backend wasm needs the package {error.name}; install the extra: uv sync --extra wasm (or "
            "pip install 'prime-rl[wasm]')"
        ) from None
    sources = [_FOLDER / "guest.py", _FOLDER / "interpreter.wit", Path(jail_program.__file__)]
    content = b"\0".join(path.read_bytes() for path in sources)
    processor = next((line for line in _read_cpuinfo() if line.startswith("flags")), "")
    digest = hashlib.sha256("\0".join([*versions, processor]).encode() + content).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return cache / "prime_rl" / f"interpreter_{digest}.cwasm"


def build_component() -> Path:
    """Compile the interpreter unless it is in the cache, and return its path. Takes half a minute the first time.

    Raises:
        ConfigError: a package is missing, or the compilation failed.
    """
    target = component_path()
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _lock(target.with_suffix(".lock")):
            if not target.exists():
                logger.info("sandbox: compiling the interpreter of the backend wasm into {}", target)
                _build(target)
    except OSError as error:
        raise ConfigError(f"cannot write the compiled interpreter to {target.parent}: {error}") from None
    return target


def _build(target: Path) -> None:
    folders = ["-p", str(_FOLDER), "-p", str(Path(jail_program.__file__).parent)]
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        built, compiled = Path(name, "interpreter.wasm"), Path(name, "interpreter.cwasm")
        wit = ["-d", str(_FOLDER / "interpreter.wit"), "-w", "interpreter"]
        _run(["-c", _BUILD, *wit, "componentize", "guest", *folders, "-o", str(built)])
        _run(["-c", _COMPILE, str(built), str(compiled)])
        compiled.replace(target)


def _run(arguments: list[str]) -> None:
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines() or ["no message"]
        raise ConfigError(f"cannot compile the interpreter of the sandbox backend wasm: {lines[-1]}")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read_cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
