"""Questions and answers of any data set: a single-turn verifiers environment."""

from dataset.environment import load_environment

__all__ = ["load_environment"]
