"""From a name to a sharded policy, ready to train."""

from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.trainer.memory import prepare_blocks
from prime_rl.trainer.model import PolicyModel, load_policy
from prime_rl.trainer.parallel import World, shard


def make_policy(config: TrainerModelConfig, seed: int, world: World) -> PolicyModel:
    """Load the model, prepare its blocks and shard it over the ranks. All ranks call it together.

    Args:
        config: which model and how it is laid out.
        seed: of the weights where `config.debug.random_init`; the same on every rank.
        world: the ranks.

    Raises:
        ConfigError: the model is missing, or of a kind that cannot be trained as configured.
    """
    policy = load_policy(config, seed)
    prepare_blocks(policy, config)
    return shard(policy, config, world)
