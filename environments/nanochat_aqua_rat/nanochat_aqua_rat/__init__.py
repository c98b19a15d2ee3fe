"""AQuA-RAT, algebra questions with five options: a single-turn verifiers environment."""

from .environment import load_environment

__all__ = ["load_environment"]
