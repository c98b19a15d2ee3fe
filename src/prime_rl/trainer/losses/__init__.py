"""Losses by name. Each is a function of `LossInputs` whose keyword arguments are its configuration keys."""

from collections.abc import Callable
from functools import partial

from prime_rl.configs.training.loss import CustomLossConfig, LossConfig
from prime_rl.trainer.losses import policy_gradients as losses
from prime_rl.trainer.losses.custom_loss import custom
from prime_rl.trainer.losses.loss_inputs import Loss, LossOutput

LOSSES: dict[str, Callable[..., LossOutput]] = {
    "aipo": losses.aipo,
    "ppo": losses.clip,
    "grpo": losses.clip,
    "dr_grpo": losses.clip,
    "gspo": losses.gspo,
    "cispo": losses.cispo,
    "reinforce": losses.reinforce,
    "tis": losses.tis,
    "dppo": losses.dppo,
    "icepop": losses.icepop,
    "decoupled_ppo": losses.decoupled_ppo,
}


def build_loss(config: LossConfig) -> Loss:
    """Bind the loss `config.type` to its keys. Raises ConfigError if a user-defined loss cannot be loaded."""
    if isinstance(config, CustomLossConfig):
        return custom(config.import_path, config.kwargs, config.proximal)
    keys = config.model_dump(exclude={"normalization", "fixed_length", "kl"})
    return partial(LOSSES[keys.pop("type")], **keys)
