"""Long plans with tools, and repairs of small repositories: multi-turn verifiers environments."""

from agentic.environment import load_environment

__all__ = ["load_environment"]
