"""Gradient norms of each block and of each role of parameters."""

from collections import defaultdict

import torch
from torch import Tensor, nn

from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.parallel.dtensor_slices import local_tensor
from prime_rl.trainer.parallel.gradients import num_copies
from prime_rl.trainer.parallel.process_group import World

_ROLES = {
    "adapter": ("lora",),
    "norm": ("norm",),
    "attention": ("attn", "attention"),
    "mlp": ("mlp", "moe", "expert", "feed_forward"),
}
"""Role of a parameter in a block -> parts of its name; the first match counts."""


@torch.no_grad()
def layer_gradient_norms(policy: PolicyModel, world: World) -> dict[str, float]:
    """Return `grad_norm/layer_<n>` and `grad_norm/<role>`, 2-norms over all ranks. All ranks call it together.

    The squares of either kind add up to the square of `gradient_norm`, except that only blocks are layers.
    """
    names = list[str]()
    indices, members = dict[str, int](), dict[int, list[int]]()
    for parameter, groups in _groups(policy):
        for group in groups:
            if group not in indices:
                indices[group] = len(names)
                names.append(group)
        members[id(parameter)] = [indices[group] for group in groups]
    totals = torch.zeros(len(names), dtype=torch.float64, device=world.device)
    held: dict[torch.device, list[tuple[Tensor, int, list[int]]]] = defaultdict(list)
    for parameter in policy.parameters():
        if parameter.grad is not None:
            local = local_tensor(parameter.grad)
            held[local.device].append((local, num_copies(parameter.grad, world), members[id(parameter)]))
    for entries in held.values():
        norms = torch._foreach_norm([local for local, _, _ in entries], 2, dtype=torch.float32)
        squares = torch.stack(list(norms)).to(totals).square()
        squares /= torch.tensor([copies for _, copies, _ in entries], dtype=torch.float64).to(totals)
        where = [(index, entry) for entry, (_, _, groups) in enumerate(entries) for index in groups]
        targets, sources = torch.tensor(where, device=totals.device).T
        totals.index_add_(0, targets, squares[sources])
    values = world.sum(totals).sqrt_().tolist()
    return {f"grad_norm/{name}": value for name, value in zip(names, values, strict=True)}


def _groups(policy: PolicyModel) -> list[tuple[nn.Parameter, list[str]]]:
    """Return the trained parameters and the layer and role of each."""
    layers = {id(p): index for index, block in enumerate(policy.blocks) for p in block.parameters()}
    embeddings = {id(module.weight) for module in policy.modules() if isinstance(module, nn.Embedding)}
    head = policy.causal_lm.get_output_embeddings().weight
    found = []
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            continue
        groups = [f"layer_{layers[id(parameter)]}"] if id(parameter) in layers else []
        if id(parameter) in embeddings:
            role = "embedding"
        elif parameter is head:
            role = "unembedding"
        else:
            role = next((role for role, parts in _ROLES.items() if any(part in name for part in parts)), "other")
        found.append((parameter, [*groups, role]))
    return found
