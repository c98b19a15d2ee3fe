"""Logic puzzles with checkers: a single-turn verifiers environment."""

from logic.environment import load_environment

__all__ = ["load_environment"]
