"""Saving a trainer and going on from where it was saved (docs/checkpoints.md)."""

from prime_rl.trainer.checkpoints.checkpointer import PART, Checkpointer, DataStream, Progress
from prime_rl.trainer.checkpoints.loading import load_model_and_optimizer

__all__ = ["PART", "Checkpointer", "DataStream", "Progress", "load_model_and_optimizer"]
