"""Expert parallelism: the ranks of a group divide the experts; loss and gradients do not change (I9).

The ranks of the group hold different tokens. Each layer sends every token, one copy per chosen expert, to the ranks
that hold these experts (all-to-all), gets the results back, and computes their weighted sum (Lepikhin et al. 2020,
GShard, arXiv:2006.16668). No token is dropped. An expert's gradient therefore covers the tokens of the whole group;
FSDP sums it over the remaining ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from prime_rl.core.errors import ConfigError
from prime_rl.trainer.parallel.collectives import all_to_all
from prime_rl.trainer.parallel.tensor_parallel import local_parameters, plan_pattern, shard_parameter


def apply_expert_parallel(causal_lm: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Divide the experts of every layer over the ranks of `mesh`, in place, and return the modules with experts.

    Parameters may be on the meta device. Raises ConfigError if transformers has no plan for experts of the model,
    or the ranks do not divide them.
    """
    plan = getattr(causal_lm.config.get_text_config(), "base_model_ep_plan", None) or {}
    modules: list[nn.Module] = []
    for name, module in causal_lm.base_model.named_modules():
        keys = [key for key in module._parameters if plan.get(plan_pattern(f"{name}.{key}")) == "grouped_gemm"]
        for key in keys:
            shard_parameter(module, key, mesh, 0, f"model.ep {mesh.size()}: {type(causal_lm).__name__} {name}")
        if keys:
            _dispatch_tokens(module, mesh.get_group())
            modules.append(module)
    if not modules:
        raise ConfigError(
            f"model.ep: transformers has no plan for experts in a {type(causal_lm).__name__}; set model.ep=1"
        )
    return modules


def _dispatch_tokens(experts: Any, group: ProcessGroup) -> None:
    inner = experts.forward
    experts.num_experts //= group.size()  # the number of local experts, which the original forward uses

    def forward(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Args: states [n, hidden]; experts chosen for each token, and their weights, both [n, k]."""
        pairs = chosen.flatten()
        order = pairs.argsort(stable=True)
        # scatter_add, because bincount waits for the device to read the largest entry.
        counts = pairs.new_zeros(experts.num_experts * group.size()).scatter_add(0, pairs, torch.ones_like(pairs))
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        # The only wait for the device in a layer: the sizes of the messages.
        num_sent, num_received = torch.stack([counts, received]).unflatten(1, (group.size(), -1)).sum(2).tolist()
        tokens = all_to_all(states[order // chosen.shape[1]], group, num_received, num_sent)
        expert_ids = torch.arange(experts.num_experts, device=states.device).repeat(group.size())
        expert_ids = expert_ids.repeat_interleave(received, output_size=len(tokens))
        results = all_to_all(_run_experts(experts, inner, tokens, expert_ids), group, num_sent, num_received)
        results = torch.empty_like(results).index_copy(0, order, results).unflatten(0, chosen.shape)
        return (results * weights[..., None]).sum(1).to(states.dtype)

    experts.forward = forward


def _run_experts(experts: nn.Module, inner: Any, tokens: Tensor, expert_ids: Tensor) -> Tensor:
    """Run each token through its expert.

    Without tokens, run one token of zeros: this rank must take part in the collectives of the backward pass.
    """
    count = len(tokens)
    if count == 0:
        tokens, expert_ids = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])]), expert_ids.new_zeros(1)
    with local_parameters(experts):
        return inner(tokens, expert_ids[:, None], tokens.new_ones(len(tokens), 1))[:count]
