"""Saving a trainer and going on from where it was saved (docs/checkpoints.md)."""

from prime_rl.trainer.checkpoints.checkpointer import Checkpointer, DataStream, Progress, load_model_and_optimizer

__all__ = ["Checkpointer", "DataStream", "Progress", "load_model_and_optimizer"]
