"""Sharding of a policy over all ranks with FSDP2, together with tensor, context and expert parallelism."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.parallel.context_parallel import ContextParallel, check_context_parallel
from prime_rl.trainer.parallel.device_mesh import Layout, Mesh
from prime_rl.trainer.parallel.dtensor_slices import local_tensor
from prime_rl.trainer.parallel.expert_parallel import apply_expert_parallel
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.parallel.tensor_parallel import apply_tensor_parallel


def shard_policy(policy: PolicyModel, config: TrainerModelConfig, world: World) -> PolicyModel:
    """Shard the policy over all ranks, in place: one FSDP unit for each block, one for the remaining modules.

    An untied embedding and output head are units as well, so that gathering them and reducing their gradients overlaps
    with other work. If they are tied, they are one parameter of the root unit.

    Nothing is read or moved: the parameters may be on the meta device. Raises ConfigError if the model cannot be
    divided as `config` requires.
    """
    layout = Layout.of(config, world.size)
    assert world.model_parallel_size == layout.model_parallel_size, "the world was created for another layout"
    mesh = Mesh(layout, world.device.type, world.timeout_s)
    causal_lm = policy.causal_lm
    if mesh.cp is not None:
        check_context_parallel(causal_lm.config.get_text_config(), config, layout.cp)
        policy.context_parallel = ContextParallel(mesh.cp.get_group())
    if mesh.tp is not None:
        apply_tensor_parallel(causal_lm, mesh.tp)
    dtype = compute_dtype(config.dtype, world.device)
    precision = partial(MixedPrecisionPolicy, param_dtype=dtype, reduce_dtype=getattr(torch, config.reduce_dtype))
    # With CPU offload, gradients and updates are on the host as well.
    on_host = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if config.fsdp_cpu_offload else OffloadPolicy()
    fsdp = partial(fully_shard, offload_policy=on_host)
    # For FSDP an integer is the number of parts into which a block's weights are resharded after the forward pass.
    ranks = layout.shard * layout.cp
    reshard = config.reshard_after_forward and (config.reshard_ranks or ranks)
    reshard = True if reshard == ranks else reshard
    if mesh.ep is not None:
        by_expert = partial(fsdp, mesh=mesh.expert_data, mp_policy=precision(), reshard_after_forward=bool(reshard))
        for experts in apply_expert_parallel(causal_lm, mesh.ep):
            by_expert(experts, shard_placement_fn=partial(_expert_placement, layout.expert_shard))
    fsdp = partial(fsdp, mesh=mesh.data)
    for block in policy.blocks:
        placement = partial(_expert_placement, ranks)
        fsdp(block, mp_policy=precision(), reshard_after_forward=reshard, shard_placement_fn=placement)
    if mesh.ep is not None:
        _set_prefetch(policy.blocks)
    embedding, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
    if embedding.weight is not head.weight:
        fsdp(embedding, mp_policy=precision(), reshard_after_forward=reshard)
        # The temperatures are float32. The head's backward pass follows directly, so its weight stays gathered.
        fsdp(head, mp_policy=precision(cast_forward_inputs=False), reshard_after_forward=False)
        register_fsdp_forward_method(head, "token_logprobs")
    # The root's inputs are token ids, temperatures and advantages, which must not be cast to bfloat16.
    fsdp(policy, mp_policy=precision(cast_forward_inputs=False), reshard_after_forward=False)
    for module in policy.modules():
        if isinstance(module, FSDPModule):  # sums, not means: parameters on different meshes then need no own factors
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return policy


def _set_prefetch(blocks: Sequence[nn.Module]) -> None:
    """Gather the weights of a block and of its experts while the previous block runs.

    FSDP's implicit prefetch requires that the host runs ahead of the device. With expert parallelism the host waits in
    every layer.
    """
    units = [[module for module in block.modules() if isinstance(module, FSDPModule)] for block in blocks]
    for current, following in pairwise(units):
        current[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(current)


def _expert_placement(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Shard a stack of fewer experts than ranks along dimension 1; along dimension 0 some ranks would hold nothing.

    FSDP requires that the ranks divide any dimension but the first; otherwise the default, dimension 0, is used.
    """
    num_experts = len(local_tensor(parameter))
    along_rows = parameter.ndim == 3 and num_experts < ranks and parameter.shape[1] % ranks == 0
    return Shard(1) if along_rows else None


def reshard_policy(model: nn.Module) -> None:
    """Free the gathered weights after a forward pass without a backward pass, which would free them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Resolve `auto`: bfloat16 on CUDA, float32 on the CPU."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, dtype)
