"""A trainer's side of a weight update: a policy in memory, and the real publisher of its versions."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from prime_rl.configs.base_model import TokenizerConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.types import PolicyVersion
from prime_rl.trainer.fsdp import shard_policy
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.weight_sync.publisher import Publisher
from prime_rl.trainer.weights.policy_loading import load_policy


@contextmanager
def process_group() -> Iterator[None]:
    """The process group of a trainer of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class PolicyPublisher:
    """A policy whose weights the test sets, and the publisher of its versions."""

    def __init__(
        self, model: Path, weights: Path, broadcast: Any, lora: dict[str, Any] | None = None, **options: Any
    ) -> None:
        config = TrainerModelConfig(name=str(model), lora=lora)
        world = World(rank=0, size=1, device=torch.device("cpu"))
        self.policy = shard_policy(load_policy(config, seed=0), config, world)
        tokenizer = load_tokenizer(TokenizerConfig(), config)
        self.publisher = Publisher(
            self.policy, tokenizer, torch.float32, world, broadcast, canary=torch.float32, **options
        )
        self.weights = weights

    @torch.no_grad()
    def become(self, model: Path) -> None:
        """Take the weights of a model."""
        other = load_policy(TrainerModelConfig(name=str(model)), seed=0)
        for mine, theirs in zip(self.policy.parameters(), other.parameters(), strict=True):
            mine.to_local().copy_(theirs)

    @torch.no_grad()
    def train(self, seed: int) -> None:
        """Change a twentieth of the weights."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.policy.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            changed = torch.rand(local.shape, generator=generator) < 0.05
            local += changed * 0.2 * local.abs().mean()

    def publish(self, step: int, last: bool = False) -> Path:
        """Publish the policy as version (0, step)."""
        target = self.weights / f"step_{step}"
        self.publisher.start(target, PolicyVersion(0, step), last)
        self.publisher.wait()
        return target
