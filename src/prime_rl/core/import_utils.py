"""Imports functions that the configuration names by import path, and checks for optional packages."""

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prime_rl.core.errors import ConfigError, summarize_exception


def require_packages(*packages: str) -> None:
    """Raise ConfigError unless these optional packages are installed."""
    for package in packages:
        if find_spec(package) is None:
            raise ConfigError(f"{package} is not installed; run `uv sync --extra cpu`, or `--extra gpu` for GPUs")


def load_function(import_path: str, key: str) -> Callable[..., Any]:
    """Import a function from an installed package or from the working directory.

    Args:
        import_path: `package.module:function` or `package.module.function`.
        key: configuration key that names it, for messages.

    Raises:
        ConfigError: the module does not exist or raises, or the name is not a callable.
    """
    module_name, _, name = import_path.replace(":", ".").rpartition(".")
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)  # last, so that its modules do not shadow installed ones
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # user code may raise anything
        summary = summarize_exception(error, location=True)
        raise ConfigError(f"{key} = {import_path!r}: cannot import {module_name}: {summary}") from error
    function = getattr(module, name, None)
    if not callable(function):
        problem = f"has no {name!r}" if function is None else f"{name!r} is {type(function).__name__}, not a function"
        raise ConfigError(f"{key} = {import_path!r}: {module.__file__}: {problem}")
    return function
