"""Metrics: declared names, JSON lines, Weights & Biases. Imports neither torch nor vllm."""

from prime_rl.monitors.monitor import Monitor

__all__ = ["Monitor"]
