"""Questions about a local corpus, answered with citations and a search tool: a multi-turn verifiers environment."""

from research.environment import load_environment

__all__ = ["load_environment"]
