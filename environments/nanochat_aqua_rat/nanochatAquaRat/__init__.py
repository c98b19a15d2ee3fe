"""The name of this environment on the hub."""

from nanochat_aqua_rat import load_environment

__all__ = ["load_environment"]
