"""Environments that run code need prime-rl, which has the sandbox, in the same Python environment."""

import importlib.util


def require_prime_rl(environment: str) -> None:
    """Raise a ValueError if prime-rl is not installed."""
    if importlib.util.find_spec("prime_rl") is None:
        raise ValueError(
            f"{environment} runs code in the sandbox of prime-rl: install prime-rl in the same environment"
        )
