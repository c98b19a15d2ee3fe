"""Deltas: what makes one policy version of the one before it, exactly, in few bytes (docs/delta.md)."""

from prime_rl.run.delta.chain import among_deltas, base_of, chain_of, rebuild
from prime_rl.run.delta.codec import Weights, apply, encode, patch
from prime_rl.run.delta.container import Delta, DeltaError

__all__ = [
    "Delta",
    "DeltaError",
    "Weights",
    "among_deltas",
    "apply",
    "base_of",
    "chain_of",
    "encode",
    "patch",
    "rebuild",
]
