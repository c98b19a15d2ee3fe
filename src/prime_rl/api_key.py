"""The key of the inference server: it comes from the environment, and goes into no file, log, command line or message.

Configurations hold the name of the variable alone. Both sides read it here, so that they agree on what the key is.
"""

import os

from prime_rl.errors import ConfigError


def read_api_key(variable: str) -> str | None:
    """Return the key in an environment variable, without the line break that a file with a secret often ends in.

    Returns:
        None where the variable is unset or empty.

    Raises:
        ConfigError: an HTTP header cannot carry it; the message does not say what it is.
    """
    key = os.environ.get(variable, "").strip()
    if not all(" " <= character <= "~" for character in key):
        raise ConfigError(
            f"{variable} holds a character that is not printable ASCII; HTTP headers cannot carry such a key"
        )
    return key or None
