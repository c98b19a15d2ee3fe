"""Optimizers, and the learning rate as a pure function of the step: nothing to save, nothing to fall out of step."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from prime_rl.configs.shared import AdamWConfig, OptimConfig, SchedulerConfig, SGDConfig
from prime_rl.errors import ConfigError


def build_optimizer(config: OptimConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Build the optimizer; weight decay is for matrices, norms and biases go without.

    Raises:
        ConfigError: an optimizer of later work.
    """
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    if isinstance(config, AdamWConfig):
        return torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas1, config.betas2), fused=True)
    if isinstance(config, SGDConfig):
        nesterov = config.nesterov and config.momentum > 0
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov)
    raise ConfigError(f"optim.type={config.type!r} is not there yet; use 'adamw' or 'sgd'")


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Use `lr` for the coming optimizer steps."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def learning_rate(config: SchedulerConfig, peak: float, step: int, max_steps: int | None) -> float:
    """Compute the learning rate of step `step` (from 0).

    Warm-up rises linearly and reaches the peak at step `warmup_steps`. Decay (linear or cosine) fills the last
    `decay_steps` steps, or all after the warm-up, and would reach `min_lr` at step `max_steps`.

    Raises:
        ConfigError: the schedule decays and `max_steps` is not set.
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / (config.warmup_steps + 1)
    if config.type == "constant":
        return peak
    if max_steps is None:
        raise ConfigError(f"scheduler.type={config.type!r} needs max_steps to know where the decay ends")
    length = max_steps - config.warmup_steps if config.decay_steps is None else config.decay_steps
    begin = max(config.warmup_steps, max_steps - length)
    done = min(1.0, max(0, step - begin) / max(1, max_steps - begin))
    left = 1 - done if config.type == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (peak - config.min_lr) * left
