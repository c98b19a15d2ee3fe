"""Makes virtual environments for environments that need other packages than those of this interpreter.

uv resolves `env.package` and `env.requirements`; the result is the lock. The run directory keeps it, so that a resumed
run uses the same packages. An interpreter is stored in the user's cache by its Python version and lock, made once, and
shared by runs. The packages of this interpreter are never changed. What was resolved is used again, until
`environments add` resolves it again.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from prime_rl.configs.environment import EnvConfig, EvalEnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.core.import_utils import hash_files

WITH_CLASSIC_API = "verifiers<0.4"
"""Added to the requirements of an environment of the classic API, which later releases do not have."""

_BUILT = frozenset({"build", "dist"})
"""Folders that a build writes into a project."""

_LOCK = "environment.lock"
"""The lock in a virtual environment, written when it is complete."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter with the packages of an environment.

    Attributes:
        path: of the executable.
        identity: names the environment, with a hash of its packages, local folders and file.
    """

    path: Path
    identity: str


def module_name(env_id: str) -> str:
    """Return the module that an `env.id` names; its owner and version are left out."""
    return env_id.rpartition("/")[2].partition("@")[0].replace("-", "_")


def requirements_of(env: EnvConfig) -> list[str]:
    """Return what an environment asks for; [] if it uses this interpreter."""
    return [*([env.package] if env.package else []), *env.requirements]


def needs_interpreter(env: EnvConfig) -> bool:
    """Return whether this interpreter lacks what an environment asks for."""
    own = ".".join(map(str, sys.version_info[:3]))
    if env.python is not None and not f"{own}.".startswith(f"{env.python}."):
        return True
    return not all(map(_is_installed, requirements_of(env)))


def _is_installed(text: str) -> bool:
    """Return whether an installed distribution meets a requirement; a path or URL counts as missing."""
    try:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            return True
        if requirement.url is not None or requirement.extras:
            return False
        return requirement.specifier.contains(distribution(requirement.name).version, prereleases=True)
    except (InvalidRequirement, PackageNotFoundError):
        return False


def prepare_interpreter(
    env: EnvConfig,
    key: str,
    own_file: Path | None,
    earlier: Path | None,
    inform: Callable[[str], None],
    *,
    refresh: bool = False,
) -> Interpreter:
    """Return an interpreter with the packages that an environment asks for; make it if it is not in the cache.

    Args:
        env: the environment.
        key: its configuration key, for errors.
        own_file: the user's file that has the environment; None if one of its packages has it.
        earlier: the lock of the run that is resumed, which is used if it belongs to the same requirements.
        inform: gets a line before something that takes time.
        refresh: resolve the packages, also if they were resolved before.

    Raises:
        ConfigError: uv is missing, or cannot resolve or install the packages.
    """
    uv = shutil.which("uv")
    if uv is None:
        raise ConfigError(f"{key}.package needs the command `uv`; install it with `pip install uv`")
    if options := [text for text in requirements_of(env) if text.startswith("-")]:
        raise ConfigError(f"{key}.requirements: {options[0]!r} is an option of pip; write a requirement or a folder")
    asked = list(map(absolute_requirement, requirements_of(env)))
    python = env.python or f"{sys.version_info.major}.{sys.version_info.minor}"
    request = "\n".join([f"# python {python}", *(f"# {line}" for line in asked), "#", ""])
    what = f"{key} ({env.label})"
    known = _known_file(request, "" if own_file is None else str(_is_classic(None, env.id, own_file)))
    lock = _read_lock(earlier, request)
    if lock is None and not refresh:
        lock = _read_known(known, request)
    if lock is not None:
        path = _install(uv, lock, python, what, inform)
        is_classic = _is_classic(path, env.id, own_file)
        if _lacks_classic_api(lock) if is_classic else f"# {WITH_CLASSIC_API}" in lock:
            lock = None  # the environment has another API now
    if lock is None:
        inform(f"{what}: resolving its packages")
        lock = request + _resolve(uv, asked, python, what)
        path = _install(uv, lock, python, what, inform)
        if _lacks_classic_api(lock) and _is_classic(path, env.id, own_file):
            asked += [WITH_CLASSIC_API]
            lock = f"{request}# {WITH_CLASSIC_API}: it has load_environment()\n{_resolve(uv, asked, python, what)}"
            path = _install(uv, lock, python, what, inform)
        temporary = known.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"lock": lock, "contents": _contents_of(lock)}))
        temporary.replace(known)
    name = module_name(env.id)
    if own_file is not None:
        name = f"{env.label} {hash_files(own_file.parent if own_file.name == '__init__.py' else own_file)}"
    return Interpreter(path, f"{name} {path.parent.parent.name[:12]}")


def _find_python(uv: str, python: str) -> str:
    """Return pyenv's newest interpreter of a version if uv finds none: one that is not selected is not in PATH."""
    if not re.fullmatch(r"[\d.]+", python) or _is_found(uv, python):
        return python
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    versions = [path.name for path in root.glob("versions/*") if (path / "bin" / "python").exists()]
    matching = [name for name in versions if re.fullmatch(rf"{re.escape(python)}(\.\d+)*", name)]
    return str(root / "versions" / max(matching, key=Version) / "bin" / "python") if matching else python


def _is_found(uv: str, python: str) -> bool:
    """Return whether uv finds an interpreter on this machine."""
    return _run([uv, "python", "find", "--system", "--no-python-downloads", python], "").returncode == 0


def _known_file(request: str, environment: str) -> Path:
    """Return the file that keeps what a request of an environment was resolved to."""
    return _cache() / f"{hashlib.blake2s(f'{request}{environment}'.encode(), digest_size=12).hexdigest()}.json"


def _read_known(file: Path, request: str) -> str | None:
    """Return a kept lock, unless its local folders have changed: they may ask for other packages now."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(file.read_text())
        lock: str = known["lock"]
        if lock.startswith(request) and known["contents"] == _contents_of(lock):
            return lock
    return None


def _contents_of(lock: str) -> list[str]:
    """Return the hashes of the local files and folders among the packages of a lock."""
    return [hash_files(path, skipped=_BUILT) for _, path in _local_projects(lock)]


def _lacks_classic_api(lock: str) -> bool:
    match = re.search(r"(?m)^verifiers==(\S+)", lock)
    return match is not None and Version(match[1]) >= Version("0.4.0.dev0")


def _is_classic(interpreter: Path | None, env_id: str, own_file: Path | None) -> bool:
    """Return whether the module of an environment has `load_environment`, without importing it."""
    place = module_name(env_id).replace(".", "/")
    files = [] if own_file is None else [own_file]
    for name in (f"{place}.py", f"{place}/__init__.py") if own_file is None else ():
        assert interpreter is not None
        files += interpreter.parent.parent.glob(f"lib/*/site-packages/{name}")
    return any("load_environment" in file.read_text(errors="replace") for file in files)


def absolute_requirement(requirement: str) -> str:
    """Return a requirement whose local path does not depend on the working directory."""
    path, bracket, extras = requirement.partition("[")
    is_path = requirement.startswith((".", "/", "~")) or requirement.endswith((".whl", ".tar.gz", "/"))
    if is_path or ("/" in path and Path(path).exists()):
        return f"{Path(path).expanduser().resolve()}{bracket}{extras}"
    return requirement


def has_lock(env: EnvConfig) -> bool:
    """Return whether an environment has an interpreter of its own, which is complete."""
    return env.interpreter is not None and _lock_of(env.interpreter).is_file()


def describe_interpreter(interpreter: Path) -> tuple[str, int]:
    """Return the versions of an interpreter and of its verifiers, and the size of its packages in bytes."""
    folder = interpreter.parent.parent
    python = re.search(r"(?m)^version_info *= *(\S+)", (folder / "pyvenv.cfg").read_text())
    found = [path.name for path in folder.glob("lib/*/site-packages/verifiers-*.dist-info")]
    verifiers = found[0].removeprefix("verifiers-").removesuffix(".dist-info") if found else "?"
    size = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
    return f"Python {python[1] if python else '?'}, verifiers {verifiers}", size


def delete_interpreter(interpreter: Path) -> None:
    """Delete an interpreter; a run that needs it makes it again."""
    shutil.rmtree(interpreter.parent.parent, ignore_errors=True)


def _lock_of(interpreter: str) -> Path:
    return Path(interpreter).parent.parent / _LOCK


def write_lock(env: EnvConfig, folder: Path) -> None:
    """Write the lock of an environment with an interpreter of its own into a folder."""
    if env.interpreter is not None:
        folder.mkdir(parents=True, exist_ok=True)
        lock_file(env, folder).write_text(_lock_of(env.interpreter).read_text())


def lock_file(env: EnvConfig, folder: Path) -> Path:
    """Return the file with the lock of an environment."""
    kind = "eval_" if isinstance(env, EvalEnvConfig) else ""
    return folder / f"{kind}{env.label.replace('/', '_')}.txt"


def _read_lock(file: Path | None, request: str) -> str | None:
    text = file.read_text() if file is not None and file.is_file() else ""
    return text if text.startswith(request) else None


def _resolve(uv: str, requirements: Sequence[str], python: str, what: str) -> str:
    python = _find_python(uv, python)
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python", python, "-"]
    first = _run(command, "\n".join(requirements))
    done = first
    if first.returncode != 0:  # without a network the packages may be in uv's cache
        done = _run([*command, "--offline"], "\n".join(requirements))
    if done.returncode != 0:
        raise ConfigError(f"{what}: its packages cannot be resolved: {_reason(first)}")
    return done.stdout


def _install(uv: str, lock: str, python: str, what: str, inform: Callable[[str], None]) -> Path:
    """Return the interpreter of a virtual environment in the cache; make it if it is not there."""
    local = list(_local_projects(lock))
    digest = hashlib.blake2s("\n".join([lock, *_contents_of(lock)]).encode(), digest_size=12).hexdigest()
    folder = _cache() / digest
    interpreter = folder / "bin" / "python"
    with folder.with_suffix(".lock").open("a") as held:  # two runs do not make the same environment
        fcntl.flock(held, fcntl.LOCK_EX)
        if (folder / _LOCK).is_file() and interpreter.exists():
            return interpreter
        count = sum(not line.startswith("#") for line in lock.splitlines())
        inform(f"{what}: installing {count} packages into {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        install = [uv, "pip", "install", "--quiet", "--no-deps", "--compile-bytecode", "--python", str(interpreter)]
        for name in (name for name, path in local if path.is_dir()):  # uv knows it by its version, not by its files
            install += ["--reinstall-package", name] if name else ["--refresh"]
        for command, text in (
            ([uv, "venv", "--quiet", "--no-project", "--python", _find_python(uv, python), str(folder)], ""),
            ([*install, "-r", "-"], lock),
        ):
            done = _run(command, text, held.fileno())
            if done.returncode != 0:
                shutil.rmtree(folder, ignore_errors=True)
                if command[1] == "venv" and not _is_found(uv, python):
                    raise ConfigError(
                        f"{what}: Python {python} is not installed and could not be downloaded; install it, or set "
                        "`python` to the path of an interpreter"
                    )
                raise ConfigError(f"{what}: its packages cannot be installed: {_reason(done)}")
        (folder / _LOCK).write_text(lock)
    return interpreter


def _local_projects(lock: str) -> Iterator[tuple[str, Path]]:
    """Yield the packages of a lock that are files or folders: name, if it is known, and path."""
    for line in lock.splitlines():
        name, at, url = line.partition(" @ ")
        path = Path(unquote((url if at else line).removeprefix("file://").partition("[")[0].partition("#")[0].strip()))
        if path.is_absolute() and path.exists():
            yield (name.partition("[")[0] if at else "") or _project_name(path), path


def _project_name(path: Path) -> str:
    """Return the name in a project's pyproject.toml; "" if it has none."""
    file = path / "pyproject.toml"
    settings = tomllib.loads(file.read_text()) if file.is_file() else {}
    return str(settings.get("project", {}).get("name", ""))


def _cache() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "prime-rl" / "environments"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made ({error.strerror}), where interpreters of environments are stored; "
            "set XDG_CACHE_HOME"
        ) from error
    return folder


def _run(command: Sequence[str], text: str, *held: int) -> "subprocess.CompletedProcess[str]":
    """Run uv, in a folder without a project, whose settings are not those of the environment.

    It inherits the `held` files: a lock lasts until uv has ended, also if this process is killed.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    return subprocess.run(
        command, input=text, env=environment, cwd=_cache(), pass_fds=held, capture_output=True, text=True
    )


def _reason(done: Any) -> str:
    """Return uv's error in one line, without its colours and drawings."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stderr or done.stdout)
    text = re.sub(r"[\u00d7\u2500-\u25ff]+", " ", text)
    text = " ".join(text.split()).removeprefix("error: ") or f"uv exited with {done.returncode}"
    return text if len(text) <= 600 else f"{text[:200]} ... {text[-400:]}"
