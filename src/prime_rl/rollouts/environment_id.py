"""Resolves `env.id` to a module, an installed package or a file of the user, and identifies its code.

| id | environment |
|---|---|
| `name` | installed package, or `name.py` (or the package `name/`) in the working directory |
| `package.module` | module inside an installed package |
| `owner/name`, `owner/name@version` | installed package |
| `path/name.py` | file |
| `path/name/`, `./name`, `/path/name` | package `name/__init__.py`, or the file `name/name.py` |

`env.identity` holds the version and a hash of the files, with hashes of added rewards, in run.toml, W&B and the
settings of evaluations; samples and checkpoints repeat it.
"""

import difflib
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
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
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.utils import canonicalize_version

from prime_rl.configs.environment import EnvConfig, environment_path
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.core.import_utils import find_function_files, hash_files, import_file
from prime_rl.rollouts.separate.added_environments import with_added_packages
from prime_rl.rollouts.separate.interpreters import (
    has_lock,
    lock_file,
    module_name,
    needs_interpreter,
    prepare_interpreter,
)

_NO_ENVIRONMENTS = ("prime-rl", "verifiers")
_OURS = {
    "competition_math": "hendrycks_math",
    "humaneval_plus": "`eval --benchmarks humanevalplus`",
    "aime_2024": "`eval --benchmarks aime24`",
    "aime_2025": "`eval --benchmarks aime25`",
    "math_500": "`eval --benchmarks math500`",
    "leetcode": "code_tests",
}
"""Environments of the hub that guides name, and what has their data here."""


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
        """Import the module; a file under another name if its own is that of another module. Raises what it raises."""
        if self.directory is not None:
            _add_directory(self.directory, self.module)
            other = _find_installed(self.module)
            if other is None or other.origin != self.origin:
                return import_file(self.origin)
        return importlib.import_module(self.module)


_directories: list[str] = []
"""Directories that were added to `sys.path`."""


def _add_directory(directory: Path, module: str) -> None:
    """Let a module import its neighbours, also if one has the name of a neighbour of another environment.

    The directory is behind those of installed modules, so that it does not shadow them.
    """
    added = str(directory)
    others = [each for each in _directories if each != added and each in sys.path]
    for name in [name for name in sys.modules if "." not in name and name != module]:
        file = Path(getattr(sys.modules[name], "__file__", None) or "")
        folder = file.parent.parent if file.name == "__init__.py" else file.parent
        if str(folder) in others and _find_in(directory, name) is not None:
            for part in [part for part in sys.modules if part.partition(".")[0] == name]:
                del sys.modules[part]
    if added not in sys.path or added in _directories:
        _directories[:] = [added, *others]
        sys.path[:] = [each for each in sys.path if each not in _directories] + _directories


def find_environment(env_id: str, key: str = "env.id") -> FoundEnvironment:
    """Find the module of an environment; `key` is its configuration key, for errors.

    `-` equals `_`. Lower case is tried if no package has the given case. The owner is ignored, because an installed
    package does not record it. A version must equal the installed one, unless it is `latest`.

    Raises:
        ConfigError: there is none, another version is installed, or two modules have the name.
    """
    if (path := environment_path(env_id)) is not None:
        return _find_file(path, f"{key} = {env_id}")
    owner, _, name = env_id.rpartition("/")
    name, _, wanted = name.partition("@")
    module = name.replace("-", "_")
    names = [each for each in (module, module.lower()) if all(map(str.isidentifier, each.split(".")))]
    try:
        with redirect_stdout(sys.stderr):  # a dry run prints TOML
            installed = next(filter(None, map(_find_installed, names)), None)
    except (
        Exception,
        SystemExit,
    ) as error:  # the package around a module is imported, and foreign code may raise anything
        raise ConfigError(f"{key} = {env_id} cannot be imported: {summarize_exception(error, full=True)}") from error
    files = [] if owner or wanted else [each for each in names if "." not in each]
    local = next(filter(None, (_find_in(Path.cwd(), each) for each in files)), None)
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
    if path.is_dir():
        files = [path.resolve() / name for name in ("__init__.py", f"{path.resolve().name}.py")]
        path = next((file for file in files if file.is_file()), files[0])
    if not path.is_file():
        raise ConfigError(f"{what}: there is no such file (looked in {Path.cwd()})")
    if path.suffix != ".py":
        raise ConfigError(f"{what} is not a Python file; write the path of a .py file, or of a directory with one")
    path = path.resolve()
    whole = path.parent if path.name == "__init__.py" else path
    if not whole.stem.isidentifier():
        raise ConfigError(f"{what}: {whole.stem!r} cannot be imported; rename the file to letters, digits and _")
    return FoundEnvironment(whole.stem, path, whole.parent)


def _find_installed(module: str) -> FoundEnvironment | None:
    """Find a module; imports the packages around it."""
    package = module.rpartition(".")[0]
    if package and _find_spec(package) is None:
        return None
    return _found(_find_spec(module))


def _find_spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            return None  # neither the module nor the package around it is there
        raise


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
    package = found.module.partition(".")[0]
    with suppress(PackageNotFoundError):
        return distribution(package)
    for name in packages_distributions().get(package, ()):
        return distribution(name)
    return next((each for each in distributions() if _is_editable_part(found.origin, each)), None)


def _is_editable_part(origin: Path, each: Distribution) -> bool:
    """Return whether a file belongs to an editable installation, which does not list its modules."""
    is_editable = _direct_url(each).get("dir_info", {}).get("editable")
    return bool(is_editable) and origin.is_relative_to(Path(_path_of(installed_from(each))).resolve())


def _direct_url(each: Distribution) -> dict[str, Any]:
    """Return how a distribution was installed (PEP 610); {} for a package index."""
    read: dict[str, Any] = json.loads(each.read_text("direct_url.json") or "{}")
    return read


def installed_from(distribution: Distribution) -> str:
    """Return the URL that a distribution was installed from; "" for a package index."""
    return str(_direct_url(distribution).get("url", ""))


def _path_of(url: str) -> str:
    return unquote(urlsplit(url).path)


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
    if owner and Path(env_id).expanduser().is_dir():
        return f"for your directory, write {env_id}/"
    file, colon, _ = env_id.partition(":")
    if colon and file.endswith(".py"):
        return f"for your file, write {file}; its function is load_environment()"
    if "." in module:
        return f"no module {module} can be imported; install the package that has it, or correct the name"
    known = [each.name.replace("-", "_") for each in installed_environments()]
    known += [path.stem for path in Path.cwd().glob("*.py")]
    similar = difflib.get_close_matches(module, known, n=1, cutoff=0.75)
    ours = _OURS.get(module.lower(), "")
    folder = Path("environments", module)
    install = f"run `uv pip install -e {folder}` for this folder, " if folder.is_dir() else "run "
    return (
        f"did you mean {similar[0]}? Otherwise " if similar else f"here it is {ours}; otherwise " if ours else ""
    ) + (
        f"{install}`prime env install {env_id}` for one of the hub, or write {module}.py with load_environment() into "
        f"{Path.cwd()}"
    )


_Env = TypeVar("_Env", bound=EnvConfig)


@dataclass(frozen=True, slots=True)
class EnvironmentIdentity:
    """Which code an environment is.

    Attributes:
        module: its name.
        version: of its distribution; None for a file of the user.
        content_hash: twelve hexadecimal digits of the names and contents of its files.
        source: path or URL that it was installed from; "" for a package index, which is not recorded.
        is_local: the source is on this machine.
    """

    module: str
    version: str | None
    content_hash: str
    source: str
    is_local: bool

    def __str__(self) -> str:
        return f"{self.module} {self.version or '(file)'} {self.content_hash}"


def identify(found: FoundEnvironment) -> EnvironmentIdentity:
    """Return the identity of an environment, without importing it. Reads its files, or those of its package."""
    package, *inner = found.module.split(".")
    outermost = _find_installed(package) if inner else None
    origin = found.origin if outermost is None else outermost.origin
    content_hash = hash_files(origin.parent if origin.name == "__init__.py" else origin)
    distribution = distribution_of(found)
    if distribution is None:
        return EnvironmentIdentity(found.module, None, content_hash, str(found.origin), True)
    url = installed_from(distribution)
    is_local = url.startswith("file:")
    source = _path_of(url) if is_local else url
    return EnvironmentIdentity(found.module, distribution.version, content_hash, source, is_local)


def identify_environments(
    environments: Sequence[_Env],
    key: str,
    warn: Callable[[str], None],
    inform: Callable[[str], None],
    locks: Path | None = None,
) -> list[_Env]:
    """Find environments, install those with `env.install`, and set their `identity` and `interpreter`.

    Args:
        environments: the keys of each.
        key: configuration key of the list, for errors.
        warn: gets a warning if a local package has the name of one of the hub, or if an environment is not the one that
            a given `identity` describes.
        inform: gets a line before packages are installed.
        locks: `RunPaths.locks_dir` of a run that is resumed.

    Raises:
        ConfigError: one is not installed, has another version, or cannot be installed.
    """
    identified = []
    for index, env in enumerate(map(with_added_packages, environments)):
        name = f"{key}.{index}"
        if env.interpreter is not None and has_lock(env):  # prepared by `rl`
            identified.append(env)
            continue
        if needs_interpreter(env):
            file = find_own_file(env, f"{name}.id")
            earlier = None if locks is None else lock_file(env, locks)
            interpreter = prepare_interpreter(env, name, None if file is None else file.origin, earlier, inform)
            text = interpreter.identity
            if env.identity not in (None, text):
                warn(f"{name}: environment {env.label!r} was {env.identity} and is now {text}")
            update = {"identity": text, "interpreter": str(interpreter.path)}
            identified.append(env.model_copy(update=update))
            continue
        found = _find_or_install(env.id, name) if env.install else find_environment(env.id, f"{name}.id")
        identity = identify(found)
        if env.identity is None and "/" in env.id and environment_path(env.id) is None and identity.is_local:
            warn(f"{name}.id = {env.id}: the local package in {identity.source} is used, not the one of the hub")
        functions = [*(reward.import_path for reward in env.rewards), *([env.agent] if env.agent else [])]
        files = dict.fromkeys(map(find_function_files, functions))
        text = " ".join([str(identity), *(f"{path.name} {hash_files(path)}" for path in files if path)])
        if env.identity not in (None, text):
            warn(f"{name}: environment {env.label!r} was {env.identity} and is now {text}")
        identified.append(env.model_copy(update={"identity": text}))
    return identified


def find_own_file(env: EnvConfig, key: str = "env.id") -> FoundEnvironment | None:
    """Find the user's file of an environment with packages of its own; None if one of these has it.

    Raises:
        ConfigError: its path does not exist.
    """
    if (path := environment_path(env.id)) is not None:
        return _find_file(path, f"{key} = {env.id}")
    name = module_name(env.id)
    return _find_in(Path.cwd(), name) if env.package is None and name.isidentifier() else None


def check_environment(env: EnvConfig, key: str) -> None:
    """Raise ConfigError if an environment is missing that is neither to be installed nor to get packages of its own."""
    env = with_added_packages(env)
    if needs_interpreter(env):
        find_own_file(env, key)
    elif not env.install:
        find_environment(env.id, key)


def check_environments(config: OrchestratorConfig, key: str) -> None:
    """Raise ConfigError if an environment that is not to be installed is missing; `key` as for `identify_all`."""
    evaluated = config.eval.env if config.eval is not None else []
    for block, environments in (("env", config.env), ("eval.env", evaluated)):
        for index, env in enumerate(environments):
            check_environment(env, f"{key}{block}.{index}.id")


def identify_all(
    config: OrchestratorConfig, key: str, warn: Callable[[str], None], inform: Callable[[str], None]
) -> OrchestratorConfig:
    """Return the configuration with the identity of all its environments.

    `key` is its prefix, for errors; the other arguments are those of `identify_environments`.
    """
    resumes = config.ckpt is not None and config.ckpt.resume_step is not None
    locks = config.run_paths.locks_dir if resumes else None
    changes: dict[str, object] = {"env": identify_environments(config.env, f"{key}env", warn, inform, locks)}
    if config.eval is not None:
        evaluated = identify_environments(config.eval.env, f"{key}eval.env", warn, inform, locks)
        changes["eval"] = config.eval.model_copy(update={"env": evaluated})
    return config.model_copy(update=changes)


def _find_or_install(env_id: str, key: str) -> FoundEnvironment:
    """Find an environment of the hub; install it if it is missing or has another version."""
    if "/" not in env_id or environment_path(env_id) is not None:
        raise ConfigError(f"{key}.install needs an environment of the hub (owner/name), not {env_id}")
    try:
        return find_environment(env_id, f"{key}.id")
    except ConfigError:
        _install(env_id, key)
    importlib.invalidate_caches()
    return find_environment(env_id, f"{key}.id")


def _install(env_id: str, key: str) -> None:
    command = shutil.which("prime")
    if command is None:
        raise ConfigError(f"{key}.install needs the command `prime`; run `uv tool install prime`")
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    done = subprocess.run(
        [command, "env", "install", env_id], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        output = " ".join((done.stderr or done.stdout).split())[-300:]
        raise ConfigError(f"{key}.install: `prime env install {env_id}` failed with {done.returncode}: {output}")
