"""Science questions with units, tolerances and choices: a single-turn verifiers environment."""

from science.environment import load_environment

__all__ = ["load_environment"]
