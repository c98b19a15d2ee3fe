"""Every trained parameter is in exactly one group, by its role; a tied output head is the embedding."""

from typing import Any

from loguru import logger
from torch import nn

from prime_rl.configs.optim import OptimConfig
from prime_rl.trainer.model import PolicyModel


def parameter_groups(config: OptimConfig, policy: PolicyModel) -> list[dict[str, Any]]:
    """Sort the trained parameters by role into groups for an optimizer of torch.

    Returns:
        At most four groups, each with `params`, `role` (embedding, unembedding, matrix, vector), `lr` (its peak) and
        `weight_decay`.
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
            reason = "the output head is tied to the embedding" if tied else "no weights of that kind are trained"
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
