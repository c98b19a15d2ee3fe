"""Resolves `env.id` to a module: an installed package, or a file of the user.

| id | environment |
|---|---|
| `name` | installed package, or `name.py` (or the package `name/`) in the working directory |
| `owner/name`, `owner/name@version` | installed package |
| `path/name.py` | file |
"""

import difflib
import importlib.util
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distribution,
    distributions,
    packages_distributions,
)
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.utils import canonicalize_version

from prime_rl.core.errors import ConfigError

_NO_ENVIRONMENTS = ("prime-rl", "verifiers")


@dataclass(frozen=True, slots=True)
class FoundEnvironment:
    """The module of an environment, not imported yet.

    Attributes:
        module: its name.
        origin: its file; `__init__.py` of a package.
        directory: the directory from which a file of the user is imported; None for an installed package.
    """

    module: str
    origin: Path
    directory: Path | None = None

    def load(self) -> ModuleType:
        """Import the module. Raises whatever its code raises."""
        if self.directory is not None and str(self.directory) not in sys.path:
            sys.path.append(str(self.directory))  # last, so that its modules do not shadow installed ones
        return importlib.import_module(self.module)


def find_environment(env_id: str, key: str = "env.id") -> FoundEnvironment:
    """Find the module of an environment; `key` is its configuration key, for errors.

    `-` equals `_`. Lower case is tried if no package has the given case. The owner is ignored, because an installed
    package does not record it. A version must equal the installed one, unless it is `latest`.

    Raises:
        ConfigError: there is none, another version is installed, or two modules have the name.
    """
    if env_id.endswith(".py"):
        return _find_file(Path(env_id).expanduser(), f"{key} = {env_id}")
    owner, _, name = env_id.rpartition("/")
    name, _, wanted = name.partition("@")
    module = name.replace("-", "_")
    names = [candidate for candidate in (module, module.lower()) if candidate.isidentifier()]
    installed = next(filter(None, map(_find_installed, names)), None)
    local = None if owner or wanted else next(filter(None, (_find_in(Path.cwd(), name) for name in names)), None)
    if installed is None and local is None:
        raise ConfigError(f"{key} = {env_id} is not installed; {_hint(env_id, module, owner)}")
    if installed is not None and local is not None and installed.origin != local.origin:
        raise ConfigError(
            f"{key} = {env_id} is both {local.origin} and the installed {installed.origin}; rename the first"
        )
    if installed is not None:
        _check_version(installed, env_id, wanted, key)
    found = installed or local
    assert found is not None, "checked above"
    return found


def _find_file(path: Path, what: str) -> FoundEnvironment:
    if not path.is_file():
        raise ConfigError(f"{what}: there is no such file (looked in {Path.cwd()})")
    path = path.resolve()
    if not path.stem.isidentifier():
        raise ConfigError(f"{what}: {path.stem!r} cannot be imported; rename the file to letters, digits and _")
    found = FoundEnvironment(path.stem, path, path.parent)
    other = _find_installed(path.stem)
    if other is not None and other.origin != path:
        raise ConfigError(f"{what}: {other.origin} is also called {path.stem}; rename your file")
    return found


def _find_installed(module: str) -> FoundEnvironment | None:
    return _found(importlib.util.find_spec(module))


def _find_in(directory: Path, module: str) -> FoundEnvironment | None:
    return _found(PathFinder.find_spec(module, [str(directory)]), directory)


def _found(spec: ModuleSpec | None, directory: Path | None = None) -> FoundEnvironment | None:
    """Return the module of a spec; None for a namespace package, which any directory is."""
    if spec is None or spec.origin is None:
        return None
    return FoundEnvironment(spec.name, Path(spec.origin).resolve(), directory)


def distribution_of(found: FoundEnvironment) -> Distribution | None:
    """Return the installed distribution that a module belongs to; None for a plain module."""
    if found.directory is not None:
        return None
    with suppress(PackageNotFoundError):
        return distribution(found.module)
    for name in packages_distributions().get(found.module, ()):
        return distribution(name)
    return next((each for each in distributions() if _is_editable_part(found.origin, each)), None)


def _is_editable_part(origin: Path, each: Distribution) -> bool:
    """Return whether a file belongs to an editable installation, which does not list its modules."""
    url = json.loads(each.read_text("direct_url.json") or "{}")
    if not url.get("dir_info", {}).get("editable"):
        return False
    return origin.is_relative_to(Path(unquote(urlsplit(url["url"]).path)).resolve())


def _check_version(found: FoundEnvironment, env_id: str, wanted: str, key: str) -> None:
    if wanted in ("", "latest"):
        return
    owner = distribution_of(found)
    installed = owner.version if owner is not None else None
    if installed is None or canonicalize_version(installed) != canonicalize_version(wanted):
        found_version = f"version {installed} is installed" if installed else f"{found.origin} has no version"
        raise ConfigError(f"{key} = {env_id}: {found_version}; run `prime env install {env_id}`, or remove @{wanted}")


def installed_environments() -> list[Distribution]:
    """Return the installed packages that require verifiers, by name; some may only use it."""
    return sorted(filter(_requires_verifiers, distributions()), key=lambda each: each.name)


def _requires_verifiers(each: Distribution) -> bool:
    return each.name not in _NO_ENVIRONMENTS and "verifiers" in {Requirement(text).name for text in each.requires or ()}


def _hint(env_id: str, module: str, owner: str) -> str:
    if owner and Path(f"{env_id}.py").expanduser().is_file():
        return f"for your file, write {env_id}.py"
    file, colon, _ = env_id.partition(":")
    if colon and file.endswith(".py"):
        return f"for your file, write {file}; its function is load_environment()"
    known = [each.name.replace("-", "_") for each in installed_environments()]
    known += [path.stem for path in Path.cwd().glob("*.py")]
    similar = difflib.get_close_matches(module, known, n=1, cutoff=0.75)
    return (f"did you mean {similar[0]}? Otherwise " if similar else "") + (
        f"run `uv pip install -e environments/{module}` for an environment of this repository, "
        f"`prime env install {env_id}` for one of the hub, or write {module}.py with load_environment() into "
        f"{Path.cwd()}"
    )
