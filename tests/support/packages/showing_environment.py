"""A classic environment that does not load, and names the settings of its sandbox in the error."""

from prime_rl_sandbox.execution import current_settings


def load_environment():
    raise ValueError(str(current_settings()))
