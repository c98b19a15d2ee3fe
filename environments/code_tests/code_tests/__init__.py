"""Programs graded by tests: a single-turn verifiers environment."""

from code_tests.environment import load_environment

__all__ = ["load_environment"]
