"""Questions that a model answers with a Python tool: a multi-turn verifiers environment."""

from python_tool.environment import load_environment

__all__ = ["load_environment"]
