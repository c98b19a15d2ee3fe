"""One line instead of a traceback where an optional dependency is not installed."""

from importlib.util import find_spec

from prime_rl.errors import ConfigError


def need_torch() -> None:
    """Raise ConfigError where torch is not installed."""
    if find_spec("torch") is None:
        raise ConfigError("torch is not installed: run `uv sync --extra cpu` (on a machine with GPUs: --extra gpu)")
