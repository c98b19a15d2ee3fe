"""Optimizers over groups of parameters, and the learning rate as a function of the step."""

from collections.abc import Callable
from typing import Any

from loguru import logger
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from prime_rl.configs.training.optim import AdamWConfig, MuonConfig, OptimConfig, SGDConfig
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.optim.muon import Muon

Groups = list[dict[str, Any]]


def _adamw(groups: Groups, config: AdamWConfig) -> Optimizer:
    return AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def _sgd(groups: Groups, config: SGDConfig) -> Optimizer:
    return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov and config.momentum > 0)


def _muon(groups: Groups, config: MuonConfig) -> Optimizer:
    betas = (config.beta1, config.beta2)
    return Muon(groups, config.lr, config.momentum, config.nesterov, config.ns_steps, config.adjust_lr, betas)


OPTIMIZERS: dict[str, Callable[[Groups, Any], Optimizer]] = {"adamw": _adamw, "sgd": _sgd, "muon": _muon}
"""By `optim.type`."""


def build_optimizer(config: OptimConfig, policy: PolicyModel) -> Optimizer:
    """Build the optimizer over the trained parameters of a sharded policy; `lr` of each group is its peak."""
    return OPTIMIZERS[config.type](parameter_groups(config, policy), config)


def parameter_groups(config: OptimConfig, policy: PolicyModel) -> list[dict[str, Any]]:
    """Group the trained parameters for a torch optimizer by `role`: embedding, unembedding, matrix, vector.

    Each group has `params`, `role`, `lr` (its peak) and `weight_decay`. A tied output head belongs to the embedding.
    """
    embeddings = {id(m.weight) for m in policy.modules() if isinstance(m, nn.Embedding)}
    head = policy.causal_lm.get_output_embeddings().weight
    rates = {"embedding": config.embedding_lr, "unembedding": config.unembedding_lr, "matrix": config.matrix_lr}
    members: dict[str, list[nn.Parameter]] = {"matrix": [], "vector": [], "embedding": [], "unembedding": []}
    for parameter in policy.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in embeddings:
            role = "embedding"
        elif parameter is head:
            role = "unembedding"
        else:
            role = "matrix" if parameter.ndim >= 2 else "vector"
        members[role].append(parameter)
    for role, rate in rates.items():
        if rate is not None and not members[role]:
            tied = role == "unembedding" and id(head) in embeddings
            reason = "the output head is tied to the embedding" if tied else "no such weights are trained"
            logger.warning(f"optim.{role}_lr has no effect: {reason}")
    return [
        {
            "params": parameters,
            "role": role,
            "lr": config.lr if rates.get(role) is None else rates[role],
            "weight_decay": config.weight_decay if role == "matrix" else 0.0,
        }
        for role, parameters in members.items()
        if parameters
    ]
