"""Imports functions that the configuration names by import path, and checks for optional packages."""

import hashlib
import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from prime_rl.core.errors import ConfigError, summarize_exception


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
    module_name, separator, name = import_path.rpartition(":")
    if not separator:
        module_name, _, name = import_path.rpartition(".")
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)  # last, so that its modules do not shadow installed ones
    try:
        is_file = module_name.endswith(".py")
        module = import_file(Path(module_name)) if is_file else importlib.import_module(module_name)
    except Exception as error:  # user code may raise anything
        summary = summarize_exception(error, location=True)
        raise ConfigError(f"{key} = {import_path!r}: cannot import {module_name}: {summary}") from error
    function = getattr(module, name, None)
    if not callable(function):
        problem = f"has no {name!r}" if function is None else f"{name!r} is {type(function).__name__}, not a function"
        raise ConfigError(f"{key} = {import_path!r}: {module.__file__}: {problem}")
    return function


def import_file(path: Path) -> ModuleType:
    """Import a Python file under a name derived from its absolute path, once per process. Raises what the file raises.

    The name differs from every other module's, so `datasets.py` in a working directory does not replace a package.
    """
    absolute = path.expanduser().resolve()
    name = f"{absolute.stem}_{hashlib.sha256(bytes(absolute)).hexdigest()[:8]}"
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
