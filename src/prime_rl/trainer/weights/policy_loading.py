"""Loads a model by name as a sharded policy that is ready to train.

The model is built on the meta device, changed and sharded before it gets storage and values. No rank ever holds more
than its shards and one whole tensor.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.fsdp import compute_dtype, shard_policy
from prime_rl.trainer.memory.activation_checkpointing import prepare_blocks
from prime_rl.trainer.model.fused_kernels import fuse_kernels
from prime_rl.trainer.model.lora import add_adapters, freeze
from prime_rl.trainer.model.policy_model import PolicyModel, build_policy
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.weights.initial_weights import InitialWeights

T = TypeVar("T")


def make_policy(config: TrainerModelConfig, seed: int, world: World, frozen: bool = False) -> PolicyModel:
    """Build the model, prepare its blocks, shard it over the ranks and load it; a collective call.

    The `seed` is that of random weights (`config.debug.random_init`). A `frozen` policy is not trained, so its weights
    may have the precision of the forward pass.

    Raises:
        ConfigError: the model is missing, or cannot be trained as configured.
        RunError: loading failed on another rank.
    """
    policy, weights = _run_on_all_ranks(world, lambda: _build_policy(config, seed, world.device))
    if frozen:
        freeze(policy, compute_dtype(config.dtype, world.device))
    if config.lora is not None:
        add_adapters(policy, config.lora, compute_dtype(config.dtype, world.device))
    prepare_blocks(policy, config)
    weights.update_names(policy.causal_lm)
    shard_policy(policy, config, world)
    home = torch.device("cpu") if config.fsdp_cpu_offload else world.device
    _run_on_all_ranks(world, lambda: weights.fill(policy, policy.causal_lm, world.device, home))
    return policy


def load_policy(config: TrainerModelConfig, seed: int) -> PolicyModel:
    """Load the whole model on the CPU, not sharded. Raises ConfigError as `make_policy`."""
    cpu = torch.device("cpu")
    policy, weights = _build_policy(config, seed, cpu)
    weights.fill(policy, policy.causal_lm, cpu, cpu)
    return policy


def _build_policy(config: TrainerModelConfig, seed: int, device: torch.device) -> tuple[PolicyModel, InitialWeights]:
    policy = build_policy(config)
    fuse_kernels(policy.causal_lm, config, device)
    return policy, InitialWeights(policy.causal_lm, config, seed)


def _run_on_all_ranks(world: World, action: Callable[[], T]) -> T:
    """Run `action`; if it fails on one rank, raise on every rank (I7)."""
    results, error = list[T](), None
    try:
        results.append(action())
    except ConfigError as caught:
        error = caught
    world.raise_on_all_ranks(error, "loading the model")
    return results[0]
