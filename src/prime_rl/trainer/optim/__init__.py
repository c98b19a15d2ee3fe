"""Optimizers over groups of parameters, and the learning rate as a pure function of the step: nothing to save,
nothing to fall out of step."""

from torch.optim import SGD, AdamW, Optimizer

from prime_rl.configs.optim import AdamWConfig, OptimConfig, SGDConfig
from prime_rl.trainer.model import PolicyModel
from prime_rl.trainer.optim.groups import parameter_groups
from prime_rl.trainer.optim.muon import Muon
from prime_rl.trainer.optim.schedule import LearningRates, schedule_factor, warn_of_short_run

__all__ = ["LearningRates", "build_optimizer", "schedule_factor", "warn_of_short_run"]


def build_optimizer(config: OptimConfig, policy: PolicyModel) -> Optimizer:
    """Build the optimizer over the trained parameters of a sharded policy; `lr` of each group is its peak."""
    groups = parameter_groups(config, policy)
    if isinstance(config, AdamWConfig):
        return AdamW(groups, lr=config.lr, betas=(config.betas1, config.betas2), fused=True)
    if isinstance(config, SGDConfig):
        nesterov = config.nesterov and config.momentum > 0
        return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov)
    return Muon(
        groups,
        lr=config.lr,
        mu=config.mu,
        nesterov=config.nesterov,
        ns_steps=config.ns_steps,
        adjust_lr=config.adjust_lr,
        betas=(config.betas1, config.betas2),
    )
