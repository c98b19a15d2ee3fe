"""What trades time for memory inside the blocks and the shards; none of it changes a number (I8, I9).

Every switch replaces the forward of a block, never the block: parameters keep the names of the published weights, and
the hooks of FSDP stay outside, so that what is recomputed, compiled or copied sees gathered weights. From the inside
out: recomputation, compilation (which sees the recomputation and plans it), copies to the host.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.trainer.activation_offload import ActivationOffload
from prime_rl.trainer.model import PolicyModel
from prime_rl.trainer.state_offload import keep_state_on_host

Forward = Callable[..., Any]

# Graphs for one kind of block: with and without gradient, fixed and changing lengths; times kinds of blocks.
_MOST_GRAPHS = 64
# Matrix products by the names of their operators; attention is told by its own, see `_is_costly`.
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm", "_scaled_mm"}


def prepare_blocks(policy: PolicyModel, config: TrainerModelConfig) -> None:
    """Set up the blocks in place, after adapters were added and before they are sharded."""
    offload = ActivationOffload.of(config.ac_offloading) if config.ac_offloading else None
    for i, block in enumerate(policy.blocks):
        forward = block.forward
        if config.ac is not None and i % config.ac.freq == 0:
            forward = recomputed(forward, selective=config.ac.mode == "selective")
        if config.compile is not None:
            forward = compiled(forward, config.compile.fullgraph)
        if offload is not None:
            forward = offload.around(block, forward)
        block.forward = forward


def prepare_optimizer(optimizer: Optimizer, config: TrainerModelConfig) -> Optimizer:
    """Set up the optimizer in place, before its first step; return it."""
    if config.optim_cpu_offload:
        keep_state_on_host(optimizer)
    return optimizer


def offload_policy(config: TrainerModelConfig) -> OffloadPolicy:
    """Say where FSDP keeps the shards between uses. With them on the host, gradients and updates are there as well."""
    if config.fsdp_cpu_offload:
        return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    return OffloadPolicy()


def recomputed(forward: Forward, selective: bool = False) -> Forward:
    """Keep only the inputs of `forward`, and what costs most if `selective`; compute the rest again for the gradient.

    Selective recomputation is that of Korthikanti et al. 2022, "Reducing activation recomputation in large transformer
    models", with the choice reversed for kernels that never store attention scores: attention's result is small beside
    its work, norms and activation functions are large beside theirs.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_costly)

    def recomputing(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return recomputing


def compiled(forward: Forward, fullgraph: bool = False) -> Forward:
    """Compile a block's forward; blocks of one kind share the result.

    The first row's length is compiled as it is; the first other length makes the graph good for all lengths.
    """
    torch._dynamo.config.recompile_limit = max(_MOST_GRAPHS, torch._dynamo.config.recompile_limit)
    return torch.compile(forward, fullgraph=fullgraph)


def _keep_costly(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_costly(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_costly(operator: Any) -> bool:
    """Whether it is a matrix product or attention, whichever kernel: all of them have it in their names."""
    name = str(operator).split(".")[1]
    return name in _PRODUCTS or "attention" in name or "attn" in name
