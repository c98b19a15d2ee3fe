"""The schedule: one factor between 0 and 1 a step, on the peak of every group of parameters."""

import math

from loguru import logger
from torch.optim import Optimizer

from prime_rl.configs.optim import SchedulerConfig
from prime_rl.errors import ConfigError


def schedule_factor(config: SchedulerConfig, peak: float, step: int, max_steps: int | None) -> float:
    """Compute the share of its peak that every learning rate has at step `step` (from 0).

    Warm-up rises linearly and reaches 1 at step `warmup_steps`. Decay (linear or cosine) fills the last `decay_steps`
    steps, or all after the warm-up, and would reach `min_lr / peak` at step `max_steps`.

    Args:
        config: the schedule.
        peak: `optim.lr`, which `min_lr` is measured against.
        step: the step.
        max_steps: where a decay ends.

    Raises:
        ConfigError: the schedule decays and `max_steps` is not set.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.type == "constant":
        return 1.0
    if max_steps is None:
        raise ConfigError(f"scheduler.type={config.type!r} needs max_steps to know where the decay ends")
    length = max_steps - config.warmup_steps if config.decay_steps is None else config.decay_steps
    begin = max(config.warmup_steps, max_steps - length)
    done = min(1.0, max(0, step - begin) / max(1, max_steps - begin))
    left = 1 - done if config.type == "linear" else (1 + math.cos(math.pi * done)) / 2
    floor = config.min_lr / peak if peak else 0.0
    return floor + (1 - floor) * left


def warn_of_short_run(config: SchedulerConfig, max_steps: int | None) -> None:
    """Say it where a run ends before its warm-up: right for a quick test of a recipe, and a mistake otherwise."""
    if max_steps is not None and config.warmup_steps > max_steps:
        logger.warning(
            f"scheduler.warmup_steps = {config.warmup_steps} is more than max_steps = {max_steps}: the learning rate "
            "never reaches optim.lr"
        )


class LearningRates:
    """The peaks of an optimizer's groups, as they are configured: a checkpoint that brings others changes nothing."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Take note of the peaks; call it before a checkpoint is loaded."""
        self._optimizer = optimizer
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self._main: float = optimizer.defaults["lr"]

    def apply(self, factor: float) -> dict[str, float]:
        """Use `factor` times the peaks from now on.

        Returns:
            `lr`, the rate of `optim.lr`, and `lr/<role>` of the groups with a peak of their own.
        """
        rates = {"lr": self._main * factor}
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
            if peak != self._main:
                rates[f"lr/{group['role']}"] = group["lr"]
        return rates
