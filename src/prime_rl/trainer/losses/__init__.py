"""Losses by name: one small function per file over `LossInputs`; its keyword arguments are its configuration keys."""

from functools import partial

from pydantic import BaseModel

from prime_rl.trainer.losses.aipo import aipo
from prime_rl.trainer.losses.base import Loss, LossInputs, LossOutput, log_ratio
from prime_rl.trainer.losses.cross_entropy import cross_entropy

__all__ = ["LOSSES", "Loss", "LossInputs", "LossOutput", "build_loss", "cross_entropy", "log_ratio"]

LOSSES = {"aipo": aipo}


def build_loss(config: BaseModel) -> Loss:
    """Bind the loss that `config.type` names to the other keys of `config`."""
    keys = config.model_dump()
    return partial(LOSSES[keys.pop("type")], **keys)
