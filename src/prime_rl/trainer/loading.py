"""From a name to a sharded policy, ready to train.

The model is built without storage, changed, sharded, and only then given storage and values, so that no rank ever
holds more than its shards and one tensor.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.errors import ConfigError
from prime_rl.trainer.kernels import fuse_kernels
from prime_rl.trainer.lora import add_adapters, freeze
from prime_rl.trainer.memory import prepare_blocks
from prime_rl.trainer.model import PolicyModel, build_policy
from prime_rl.trainer.parallel import World, compute_dtype, shard
from prime_rl.trainer.weights import Weights

T = TypeVar("T")


def make_policy(config: TrainerModelConfig, seed: int, world: World, frozen: bool = False) -> PolicyModel:
    """Build the model, prepare its blocks, shard it over the ranks and load it. All ranks call it together.

    Args:
        config: which model and how it is laid out.
        seed: of the weights where `config.debug.random_init`; the same on every rank.
        world: the ranks.
        frozen: it will not be trained, so its weights may be kept in the precision of the forward pass.

    Raises:
        ConfigError: the model is missing, or of a kind that cannot be trained as configured.
        RunError: another rank, on a node with other files, found so.
    """
    policy, weights = _on_every_rank(world, lambda: _find(config, seed, world.device))
    if frozen:
        freeze(policy, compute_dtype(config.dtype, world.device))
    if config.lora is not None:
        add_adapters(policy, config.lora, compute_dtype(config.dtype, world.device))
    prepare_blocks(policy, config)
    weights.follow(policy.causal_lm)
    shard(policy, config, world)
    home = torch.device("cpu") if config.fsdp_cpu_offload else world.device
    _on_every_rank(world, lambda: weights.fill(policy, policy.causal_lm, world.device, home))
    return policy


def _find(config: TrainerModelConfig, seed: int, device: torch.device) -> tuple[PolicyModel, Weights]:
    policy = build_policy(config)
    fuse_kernels(policy.causal_lm, config, device)
    return policy, Weights(policy.causal_lm, config, seed)


def _on_every_rank(world: World, action: Callable[[], T]) -> T:
    """Run what needs no other rank; if it fails on one, none goes on to wait for that one (I7)."""
    results, error = list[T](), None
    try:
        results.append(action())
    except ConfigError as caught:
        error = caught
    world.fail_together(error, "loading the model")
    return results[0]
