"""Recomputation and compilation of blocks, and offloading, as configured; results do not change (I8, I9).

Each option replaces the forward of a block, not the block: parameters keep their published names, and FSDP's hooks stay
outside, so the wrapped code sees gathered weights. From the inside out: recomputation, compilation (which plans the
recomputation), copies to the host.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.trainer.memory.activation_offload import ActivationOffload
from prime_rl.trainer.memory.optimizer_offload import offload_state
from prime_rl.trainer.model.policy_model import PolicyModel

Forward = Callable[..., Any]

# Graphs for each kind of block: with and without gradient, with fixed and dynamic lengths.
_MAX_GRAPHS = 64
# Names of the operators of matrix products.
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm", "_scaled_mm"}


def prepare_blocks(policy: PolicyModel, config: TrainerModelConfig) -> None:
    """Wrap the forward of the blocks, after adapters were added and before they are sharded."""
    ao = config.ac_offloading
    offload = ActivationOffload(ao.pin_memory, ao.max_inflight_activations) if ao else None
    for i, block in enumerate(policy.blocks):
        forward = block.forward
        if config.ac is not None and i % config.ac.freq == 0:
            has_dropout = config.lora is not None and config.lora.dropout > 0
            forward = checkpoint_forward(forward, selective=config.ac.mode == "selective", random=has_dropout)
        if config.compile is not None:
            # Blocks of one kind share graphs: the first one is for the length of the first row, the second for all.
            torch._dynamo.config.recompile_limit = max(_MAX_GRAPHS, torch._dynamo.config.recompile_limit)
            forward = torch.compile(forward, fullgraph=config.compile.fullgraph)
        if offload is not None:
            forward = offload.wrap(block, forward)
        block.forward = forward


def prepare_optimizer(optimizer: Optimizer, config: TrainerModelConfig) -> Optimizer:
    """Set up offloading of the optimizer's state, before its first step; return the optimizer."""
    if config.optim_cpu_offload:
        offload_state(optimizer)
    return optimizer


def checkpoint_forward(forward: Forward, selective: bool = False, random: bool = False) -> Forward:
    """Save only the inputs of a block's `forward`, and recompute the rest in the backward pass.

    With `selective`, results of matrix products and attention are saved as well: the selective recomputation of
    Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", adapted to attention
    kernels that never store scores, whose results are small compared with their cost. `random` restores the random
    state for the recomputation, which only adapters with dropout need.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_costly)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return recomputed


def _keep_costly(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """Save the results of matrix products and attention, which are recognized by the operator's name."""
    name = str(operator).split(".")[1]
    is_costly = name in _PRODUCTS or "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if is_costly else CheckpointPolicy.PREFER_RECOMPUTE
