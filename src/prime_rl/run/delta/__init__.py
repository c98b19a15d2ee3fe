"""Deltas: what makes one policy version of the one before it, exactly, in few bytes (docs/delta.md)."""

from prime_rl.run.delta.codec import Weights, apply, encode, patch
from prime_rl.run.delta.container import Delta, DeltaError

__all__ = ["Delta", "DeltaError", "Weights", "apply", "encode", "patch"]
