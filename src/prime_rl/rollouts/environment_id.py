"""Resolves `env.id` (`name`, `owner/name` or `owner/name@version`) to an installed package."""

import importlib.util
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from packaging.utils import canonicalize_version

from prime_rl.core.errors import ConfigError


def find_environment(env_id: str, key: str = "env.id") -> str:
    """Return the module name of an environment; `key` is its configuration key, for errors.

    `-` equals `_`. Lower case is tried if no package has the given case. The owner is ignored, because an installed
    package does not record it. A version must equal the installed one, unless it is `latest`.

    Raises:
        ConfigError: no such package is installed, or another version is.
    """
    name, _, wanted = env_id.split("/")[-1].partition("@")
    module = name.replace("-", "_")
    found = next((candidate for candidate in (module, module.lower()) if _is_installed(candidate)), None)
    if found is None:
        raise ConfigError(
            f"{key} = {env_id} is not installed; run `uv pip install -e environments/{module}` for an "
            f"environment of this repository, `prime env install {env_id}` for one of the hub"
        )
    with suppress(PackageNotFoundError):  # a plain module, or a package with another distribution name
        installed = version(found)
        if wanted not in ("", "latest") and canonicalize_version(installed) != canonicalize_version(wanted):
            raise ConfigError(
                f"{key} = {env_id}: version {installed} is installed; run `prime env install {env_id}`, "
                f"or remove @{wanted}"
            )
    return found


def _is_installed(module: str) -> bool:
    return module.isidentifier() and importlib.util.find_spec(module) is not None
