"""Which code an environment is: its version, a hash of its files, and where it was installed from.

`env.identity` holds it in run.toml, W&B and the settings of evaluations; samples and checkpoints repeat it.
"""

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.shared.blocks import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.environments.environment_id import FoundEnvironment, distribution_of, find_environment

_MAX_HASHED_BYTES = 16 << 20
"""Of a larger file, such as data in the package, only name and size are hashed."""

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
    """Return the identity of an environment, without importing it. Reads its files."""
    is_package = found.origin.name == "__init__.py"
    content_hash = _hash_files(found.origin.parent if is_package else found.origin)
    distribution = distribution_of(found)
    if distribution is None:
        return EnvironmentIdentity(found.module, None, content_hash, str(found.origin), True)
    url = installed_from(distribution)
    source = unquote(urlsplit(url).path) if url.startswith("file:") else url
    return EnvironmentIdentity(found.module, distribution.version, content_hash, source, url.startswith("file:"))


def installed_from(distribution: Distribution) -> str:
    """Return the URL that a distribution was installed from; "" for a package index."""
    return str(json.loads(distribution.read_text("direct_url.json") or "{}").get("url", ""))


def identify_environments(environments: Sequence[_Env], key: str, warn: Callable[[str], None]) -> list[_Env]:
    """Find environments, install those with `env.install`, and set their `identity`.

    Args:
        environments: the keys of each.
        key: configuration key of the list, for errors.
        warn: gets a warning if a local package has the name of one of the hub, or if an environment is not the one that
            a given `identity` describes.

    Raises:
        ConfigError: one is not installed, has another version, or cannot be installed.
    """
    identified = []
    for index, env in enumerate(environments):
        name = f"{key}.{index}"
        found = _find_or_install(env.id, name) if env.install else find_environment(env.id, f"{name}.id")
        identity = identify(found)
        if env.identity is None and "/" in env.id and not env.id.endswith(".py") and identity.is_local:
            warn(f"{name}.id = {env.id}: the local package in {identity.source} is used, not the one of the hub")
        if env.identity not in (None, str(identity)):
            warn(f"{name}: environment {env.label!r} was {env.identity} and is now {identity}")
        identified.append(env.model_copy(update={"identity": str(identity)}))
    return identified


def identify_all(config: OrchestratorConfig, key: str, warn: Callable[[str], None]) -> OrchestratorConfig:
    """Return the configuration with the identity of all its environments; `key` is its prefix, for errors."""
    changes: dict[str, object] = {"env": identify_environments(config.env, f"{key}env", warn)}
    if config.eval is not None:
        evaluated = identify_environments(config.eval.env, f"{key}eval.env", warn)
        changes["eval"] = config.eval.model_copy(update={"env": evaluated})
    return config.model_copy(update=changes)


def _find_or_install(env_id: str, key: str) -> FoundEnvironment:
    """Find an environment of the hub; install it if it is missing or has another version."""
    if "/" not in env_id or env_id.endswith(".py"):
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


def _hash_files(root: Path) -> str:
    """Return the hash of a file, or of all files below a directory; links are followed."""
    digest = hashlib.blake2s(digest_size=6)
    for name, path in sorted(_files(root)):
        size = path.stat().st_size
        content = path.read_bytes() if size <= _MAX_HASHED_BYTES else b""
        digest.update(f"{len(name)} {name} {size} ".encode() + content)
    return digest.hexdigest()


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files below `root` with their relative names, without caches and hidden ones."""
    if root.is_file():
        yield root.name, root
        return
    seen = set[str]()
    for directory, names, files in os.walk(root, followlinks=True):
        if (real := os.path.realpath(directory)) in seen:
            names.clear()  # a link to a directory above
            continue
        seen.add(real)
        names[:] = [name for name in names if name != "__pycache__" and not name.startswith(".")]
        for name in files:
            path = Path(directory, name)
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(root).as_posix(), path
