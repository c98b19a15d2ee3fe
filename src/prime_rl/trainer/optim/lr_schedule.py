"""The learning rate schedule: one factor per step, multiplied with the peak rate of every parameter group."""

import math

from loguru import logger
from torch.optim import Optimizer

from prime_rl.configs.training.optim import SchedulerConfig
from prime_rl.core.errors import ConfigError


def schedule_factor(config: SchedulerConfig, peak: float, step: int, max_steps: int | None) -> float:
    """Compute the factor of all configured rates at step `step` (from 0).

    Warm-up rises linearly and reaches `scheduler.factor` at step `warmup_steps`. Decay (linear or cosine) fills the
    last `decay_steps` steps, or all after the warm-up, and would reach `min_lr / peak` at step `max_steps`. `peak` is
    `optim.lr`. Raises ConfigError if the schedule decays and `max_steps` is not set.
    """
    if step < config.warmup_steps:
        return config.factor * (step + 1) / (config.warmup_steps + 1)
    if config.type == "constant":
        return config.factor
    if max_steps is None:
        raise ConfigError(f"scheduler.type={config.type!r} needs max_steps to know where the decay ends")
    length = max_steps - config.warmup_steps if config.decay_steps is None else config.decay_steps
    begin = max(config.warmup_steps, max_steps - length)
    done = min(1.0, max(0, step - begin) / max(1, max_steps - begin))
    left = 1 - done if config.type == "linear" else (1 + math.cos(math.pi * done)) / 2
    floor = config.min_lr / peak if peak else 0.0
    return floor + (config.factor - floor) * left


def warn_if_warmup_exceeds_run(config: SchedulerConfig, max_steps: int | None) -> None:
    """Log a warning if the run ends during the warm-up."""
    if max_steps is not None and config.warmup_steps > max_steps:
        logger.warning(
            f"scheduler.warmup_steps = {config.warmup_steps} is more than max_steps = {max_steps}: the learning rate "
            "never reaches optim.lr"
        )


class LearningRates:
    """Applies the schedule to the configured peak rates; rates in a loaded checkpoint are ignored."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Store the peaks; call it before a checkpoint is loaded."""
        self._optimizer = optimizer
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self._main: float = optimizer.defaults["lr"]

    def apply(self, factor: float) -> dict[str, float]:
        """Set the rates to `factor` times the peaks; return `lr`, and `lr/<role>` of groups with another peak."""
        rates = {"lr": self._main * factor}
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
            if peak != self._main:
                rates[f"lr/{group['role']}"] = group["lr"]
        return rates
