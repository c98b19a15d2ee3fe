"""From a name to a sharded policy, ready to train.

The model is built without storage, changed, sharded, and only then given storage and values, so that no rank ever
holds more than its shards and one tensor.
"""

import torch

from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.trainer.lora import add_adapters
from prime_rl.trainer.memory import prepare_blocks
from prime_rl.trainer.model import PolicyModel, build_policy
from prime_rl.trainer.parallel import World, compute_dtype, shard
from prime_rl.trainer.weights import Weights


def make_policy(config: TrainerModelConfig, seed: int, world: World) -> PolicyModel:
    """Build the model, prepare its blocks, shard it over the ranks and load it. All ranks call it together.

    Args:
        config: which model and how it is laid out.
        seed: of the weights where `config.debug.random_init`; the same on every rank.
        world: the ranks.

    Raises:
        ConfigError: the model is missing, or of a kind that cannot be trained as configured.
    """
    policy = build_policy(config)
    weights = Weights(policy.causal_lm, config, seed)
    if config.lora is not None:
        add_adapters(policy, config.lora, compute_dtype(config.dtype, world.device))
    prepare_blocks(policy, config)
    weights.follow(policy.causal_lm)
    shard(policy, config, world)
    home = torch.device("cpu") if config.fsdp_cpu_offload else world.device
    weights.fill(policy, policy.causal_lm, world.device, home)
    return policy
