"""Losses by name: one small function per file over `LossInputs`; its keyword arguments are its configuration keys."""

from collections.abc import Callable
from functools import partial

from prime_rl.configs.loss import CustomLossConfig, KLConfig, LossConfig
from prime_rl.trainer.losses.aipo import aipo
from prime_rl.trainer.losses.base import Loss, LossInputs, LossOutput, log_ratio
from prime_rl.trainer.losses.cispo import cispo
from prime_rl.trainer.losses.clip import clip
from prime_rl.trainer.losses.cross_entropy import cross_entropy
from prime_rl.trainer.losses.custom import custom
from prime_rl.trainer.losses.decoupled_ppo import decoupled_ppo
from prime_rl.trainer.losses.dppo import dppo
from prime_rl.trainer.losses.gspo import gspo
from prime_rl.trainer.losses.icepop import icepop
from prime_rl.trainer.losses.reference_kl import distillation, kl_penalty
from prime_rl.trainer.losses.reinforce import reinforce, tis
from prime_rl.trainer.losses.weights import Normalization, token_weights

__all__ = [
    "LOSSES",
    "KLConfig",
    "Loss",
    "LossConfig",
    "LossInputs",
    "LossOutput",
    "Normalization",
    "build_loss",
    "cross_entropy",
    "distillation",
    "kl_penalty",
    "log_ratio",
    "token_weights",
]

LOSSES: dict[str, Callable[..., LossOutput]] = {
    "aipo": aipo,
    "ppo": clip,
    "grpo": clip,
    "dr_grpo": clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "tis": tis,
    "dppo": dppo,
    "icepop": icepop,
    "decoupled_ppo": decoupled_ppo,
}

_OF_EVERY_LOSS = {"normalization", "fixed_length", "kl"}


def build_loss(config: LossConfig) -> Loss:
    """Bind the loss that `config.type` names to its own keys of `config`.

    Raises:
        ConfigError: a loss of the user's own that cannot be loaded.
    """
    if isinstance(config, CustomLossConfig):
        return custom(config.import_path, config.kwargs, config.proximal)
    keys = config.model_dump(exclude=_OF_EVERY_LOSS)
    return partial(LOSSES[keys.pop("type")], **keys)
