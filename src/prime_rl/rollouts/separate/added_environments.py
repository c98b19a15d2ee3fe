"""Environments that `environments add` has stored: their ids, and the packages with which they run.

They are listed in `~/.local/share/prime-rl/environments.json`. A configuration names one by its id alone.
"""

import ast
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import unquote

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError, translate_error, unwritable

Api = Literal["classic", "v1"]

_Env = TypeVar("_Env", bound=EnvConfig)
_KEYS = ("id", "package", "requirements", "python")
_TASKSETS = "verifiers.v1.tasksets."
_TESTS = ("test", "tests")


def _file() -> Path:
    root = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    return root / "prime-rl" / "environments.json"


def added_environments() -> dict[str, dict[str, Any]]:
    """Return `id`, `package`, `requirements`, `python`, `interpreter` and `api` of each, by the id that names it.

    Raises:
        ConfigError: the list cannot be read.
    """
    file = _file()
    if not file.is_file():
        return {}
    try:
        listed: dict[str, dict[str, Any]] = json.loads(file.read_text())
        for each in listed.values():
            EnvConfig(**{key: each[key] for key in (*_KEYS, "interpreter")})
        return {name: {key: each[key] for key in (*_KEYS, "interpreter", "api")} for name, each in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is not a list of environments ({type(error).__name__}); delete it, and add them again"
        ) from None


def store_environments(environments: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the list of added environments. Raises ConfigError if it cannot be written."""
    file = _file()
    with translate_error(OSError, unwritable(f"{file} cannot be written", "set XDG_DATA_HOME")):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(environments, indent=1) + "\n")
        temporary.replace(file)


def with_added_packages(env: _Env) -> _Env:
    """Return the configuration of an environment with the packages that were stored under its id, if they were.

    Those in the configuration take precedence.
    """
    if env.package or env.requirements or env.python or env.interpreter:
        return env
    if (stored := added_environments().get(env.id)) is None:
        return env
    return env.model_copy(update={**{key: stored[key] for key in _KEYS}, "name": env.label})


def find_modules(interpreter: Path, source: str, module: str | None) -> dict[str, Api]:
    """Return the environments in a package: their modules, and the API of each, without importing them.

    Args:
        interpreter: has the package.
        source: the requirement that named it.
        module: the only one that is wanted.

    Raises:
        ConfigError: it has none.
    """
    each = _distribution(interpreter, source)
    found: dict[str, Api] = {}
    for file in each.files or ():
        name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        if file.suffix != ".py" or not all(map(str.isidentifier, name.split("."))) or file.parts[0] in _TESTS:
            continue
        with suppress(OSError, SyntaxError, UnicodeDecodeError):
            path = Path(str(file.locate()))
            if module == name:  # it may define the environment in a way that is not seen
                return {name: "classic" if "load_environment" in path.read_text() else api_of(path) or "classic"}
            if (api := api_of(path)) is not None:
                found[name] = api
    if each.name.lower() == "verifiers":  # it has a load_environment that is none
        found = {name.removeprefix(_TASKSETS): "v1" for name in found if name.startswith(_TASKSETS)}
    outer = {name: api for name, api in found.items() if not any(name.startswith(f"{other}.") for other in found)}
    if not outer:
        raise ConfigError(f"{source} has no module with load_environment(), and no v1 taskset")
    if module is not None:
        if module not in outer:
            raise ConfigError(f"{source} has no environment {module}; it has {', '.join(outer)}")
        return {module: outer[module]}
    return outer


def _distribution(interpreter: Path, source: str) -> Distribution:
    folders = [str(folder) for folder in interpreter.parent.parent.glob("lib/*/site-packages")]
    for each in distributions(path=folders):
        url = unquote(json.loads(each.read_text("direct_url.json") or "{}").get("url", "")).removeprefix("file://")
        with suppress(InvalidRequirement):
            if canonicalize_name(Requirement(source).name) == canonicalize_name(each.name):
                return each
        if url and url in source:
            return each
    raise ConfigError(f"{source} is not among the packages in {interpreter.parent.parent}")


def api_of(file: Path) -> Api | None:
    """Return the API of the environment that a file defines or imports; None if there is none."""
    text = file.read_text()
    if not re.search(r"load_environment|Taskset|import \*", text):
        return None
    names = set(_names(ast.parse(text), file.parent))
    if "load_environment" in names:
        return "classic"
    return "v1" if "__all__" in names and any(name.endswith("Taskset") for name in names) else None


def _names(tree: ast.Module, folder: Path) -> Iterator[str]:
    """Yield the names that a module defines or imports at its top level; for classes also those that they use."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
                yield from (inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute))
                yield from (inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name))
            case ast.ImportFrom(names=[ast.alias(name="*")], module=str(module), level=1):
                with suppress(OSError, SyntaxError, UnicodeDecodeError):
                    path = folder.joinpath(*module.split(".")).with_suffix(".py")
                    yield from _names(ast.parse(path.read_text()), path.parent)
            case ast.ImportFrom(names=names):
                yield from (each.asname or each.name for each in names)
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
