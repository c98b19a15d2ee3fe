"""Turns functions of the calling program into files that the processes of a run can import.

A function of an installed package, or of a module in the working directory, is named by its import path. Any other one
is written to `code/NAME_HASH.py` of the run directory by cloudpickle: functions of `__main__`, of a notebook, lambdas
and closures by value, with the global variables that they use; functions of other modules by reference. So
the file needs the same Python and the same packages, and a later change of the function does not reach a resumed run.
"""

import base64
import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable
from keyword import iskeyword
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from prime_rl.core.errors import ConfigError, summarize_exception, translate_error, unwritable
from prime_rl.loading.diagnostics import find_secret

_TEMPLATE = '''"""{name}, written by prime_rl.Run.

{source}
"""

import base64
import pickle
import sys

sys.path += [folder for folder in {folders!r} if folder not in sys.path]
{name} = pickle.loads(base64.b85decode({payload!r}))
'''


def name_function(function: Callable[..., Any], directory: Path) -> str:
    """Return an import path by which other processes load `function`; writes a file to `directory` if needed.

    Raises:
        ConfigError: the function cannot be pickled, or the file cannot be written.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module and name.isidentifier() and _is_importable(module, name, function):
        return f"{module}:{name}"
    name = _identifier(getattr(function, "__name__", type(function).__name__))
    return f"{write_code(name, function, directory)}:{name}"


def write_code(name: str, value: Any, directory: Path) -> Path:
    """Write a Python file that defines `name` as `value`, and return its absolute path.

    Raises:
        ConfigError: the value cannot be pickled, it contains a secret, or the file cannot be written.
    """
    try:
        payload = cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - objects may raise anything when they are pickled
        summary = summarize_exception(error, full=True)
        raise ConfigError(
            f"{name} cannot be sent to the processes of the run ({summary}); pass a function that makes it"
        ) from None
    if (variable := find_secret(payload + _source(value).encode())) is not None:
        raise ConfigError(
            f"{name} contains the value of the environment variable {variable}, and code/ is written to disk; read "
            f"os.environ[{variable!r}] inside the function"
        )
    text = _TEMPLATE.format(
        name=name, source=_source(value), folders=_own_folders(), payload=base64.b85encode(payload).decode()
    )
    path = directory.resolve() / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
    with translate_error(OSError, unwritable(f"cannot write {path}", "set output_dir to a writable folder")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def program_name() -> str:
    """The name of the calling program: the stem of its script, or `notebook`."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return Path(file).stem if file else "notebook"


def _is_importable(module: str, name: str, function: object) -> bool:
    """Whether the processes of the run find the function in this module: installed, or in the working directory."""
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if module == "__main__" or file is None or getattr(loaded, name, None) is not function:
        return False
    depth = module.count(".") + (Path(file).name == "__init__.py")
    return Path(file).resolve().parents[depth] in {Path.cwd(), *_installed()}


def _installed() -> set[Path]:
    return {Path(sysconfig.get_path(scheme)).resolve() for scheme in ("stdlib", "purelib", "platlib")}


def _own_folders() -> list[str]:
    """The folders of `sys.path` that other processes may not have, such as that of the script."""
    installed = _installed()
    folders = dict.fromkeys(Path(folder).resolve() for folder in sys.path)
    return [str(folder) for folder in folders if folder.is_dir() and not installed & {folder, *folder.parents}]


def _source(value: Any) -> str:
    """The source of a function, for readers of the file; "" for other values."""
    try:
        source = inspect.getsource(value)
    except (OSError, TypeError):
        return ""
    return source.replace("\\", "\\\\").replace('"""', "'''").rstrip()


def _identifier(name: str) -> str:
    plain = re.sub(r"\W", "", name)
    return plain if plain.isidentifier() and not iskeyword(plain) else f"{plain}_function"
