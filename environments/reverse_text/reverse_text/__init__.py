"""Reverse a piece of text: a single-turn verifiers environment."""

from reverse_text.environment import load_environment

__all__ = ["load_environment"]
