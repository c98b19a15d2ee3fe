"""Environments that run code need the package prime-rl-sandbox in the same Python environment."""

import importlib.util


def require_sandbox(environment: str) -> None:
    """Raise a ValueError if the sandbox is not installed."""
    if importlib.util.find_spec("prime_rl_sandbox") is None:
        raise ValueError(f"{environment} runs code: install prime-rl-sandbox (packages/sandbox) beside it")
