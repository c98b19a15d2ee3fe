"""A short name of this environment."""

from nanochat_aqua_rat import load_environment

__all__ = ["load_environment"]
