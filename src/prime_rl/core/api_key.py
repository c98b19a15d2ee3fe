"""API keys of the project's servers. They are read from the environment and never written to files, logs or command
lines. Configurations contain only the name of the variable.
"""

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prime_rl.core.errors import ConfigError

API_KEY_VAR = "INFERENCE_SERVER_API_KEY"
"""Default of `client.api_key_var`, the environment variable with the key of the inference server."""
RELAY_KEY_VAR = "RELAY_API_KEY"
"""Default of the environment variable with the key of the relays of a run."""
GATEWAY_KEY_VAR = "GATEWAY_API_KEY"
"""Environment variable with the key of a `gateway`, which environment workers inherit."""


def read_api_key(variable: str) -> str | None:
    """Return the key in an environment variable, without surrounding whitespace; None if unset or empty.

    Raises:
        ConfigError: an HTTP header cannot carry the key. The message does not contain the key.
    """
    key = os.environ.get(variable, "").strip()
    if not all(" " <= character <= "~" for character in key):
        raise ConfigError(
            f"{variable} contains a character that is not printable ASCII; HTTP headers cannot carry such a key"
        )
    return key or None


def has_key(authorization: str, key: str) -> bool:
    """Whether this value of the header `Authorization` contains the key."""
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), key.encode())


def withheld_from_environments(variables: Sequence[str], settings: Mapping[str, Any]) -> frozenset[str]:
    """Return the environment variables that environment workers must not inherit: keys of servers.

    Model-written code that runs in a worker must not find them. The worker receives the key for sampling in its first
    message. The default variables and those in `variables` are withheld, except the ones that `args` of an environment
    in `settings` name.
    """
    return frozenset({API_KEY_VAR, RELAY_KEY_VAR, *variables} - set(_strings_in_args(settings)))


def _strings_in_args(value: object, within: bool = False) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _strings_in_args(inner, within or key == "args")
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings_in_args(inner, within)
    elif within and isinstance(value, str):
        yield value
