"""I9 for mixtures of experts: each rank of a group owns some experts, and tokens travel to the owners and back.

The ranks of the group hold different tokens. In a layer, each sends its tokens, one copy for each expert that the
router chose, to the experts' owners (all-to-all), gets what the experts made of them, and weighs and sums it itself
(Lepikhin et al. 2020, GShard, arXiv:2006.16668). No token is dropped. An expert's gradient is thereby that of the whole
group's tokens; FSDP sums it over the remaining ranks only.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from prime_rl.errors import ConfigError
from prime_rl.trainer.collectives import exchange
from prime_rl.trainer.tensor_parallel import divide, local_parameters, wildcard


def share_experts(causal_lm: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Divide the experts of every layer over the ranks of `mesh`, in place; parameters may be on the meta device.

    Returns:
        The modules that hold experts, which are to be sharded over the ranks beside the group.

    Raises:
        ConfigError: the model has no experts that transformers has a plan for, or the ranks do not divide them.
    """
    plan = getattr(causal_lm.config.get_text_config(), "base_model_ep_plan", None) or {}
    shared: list[nn.Module] = []
    for name, module in causal_lm.base_model.named_modules():
        keys = [key for key in module._parameters if plan.get(wildcard(f"{name}.{key}")) == "grouped_gemm"]
        for key in keys:
            divide(module, key, mesh, 0, f"model.ep {mesh.size()}: {type(causal_lm).__name__} {name}")
        if keys:
            _send_tokens(module, mesh.get_group())
            shared.append(module)
    if not shared:
        raise ConfigError(
            f"model.ep: transformers has no plan for experts in a {type(causal_lm).__name__}; set model.ep=1"
        )
    return shared


def _send_tokens(experts: Any, group: ProcessGroup) -> None:
    inner = experts.forward
    experts.num_experts //= group.size()  # of this rank: what its own forward counts with

    def forward(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Args: states [n, hidden]; chosen, the experts of each token, and their weights [n, k]."""
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=experts.num_experts * group.size())
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        there, here = (c.view(group.size(), -1).sum(1).tolist() for c in (counts, received))
        tokens = exchange(states[order // chosen.shape[1]], group, here, there)
        own = torch.arange(experts.num_experts, device=states.device).repeat(group.size())
        made = exchange(_apply(experts, inner, tokens, own.repeat_interleave(received)), group, there, here)
        pairs = torch.empty_like(made).index_copy(0, order, made).unflatten(0, chosen.shape)
        return (pairs * weights[..., None]).sum(1).to(states.dtype)

    experts.forward = forward


def _apply(experts: nn.Module, inner: Any, tokens: Tensor, own: Tensor) -> Tensor:
    """Run tokens through one expert each. None at all are one of zeros, or a rank would miss in the backward pass."""
    count = len(tokens)
    if count == 0:
        tokens, own = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])]), own.new_zeros(1)
    with local_parameters(experts):
        made: Tensor = inner(tokens, own[:, None], tokens.new_ones(len(tokens), 1))
    return made[:count]
