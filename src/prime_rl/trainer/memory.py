"""What trades time for memory inside the blocks and the shards; none of it changes a number (I8, I9)."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import OffloadPolicy
from torch.utils.checkpoint import checkpoint

from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.trainer.model import PolicyModel


def prepare_blocks(policy: PolicyModel, config: TrainerModelConfig) -> None:
    """Set up the blocks in place, after adapters were added and before they are sharded."""
    for i, block in enumerate(policy.blocks):
        if config.ac is not None and i % config.ac.freq == 0:
            _recompute_in_backward(block)


def offload_policy(config: TrainerModelConfig) -> OffloadPolicy:
    """Say where FSDP keeps the shards between uses."""
    return OffloadPolicy()


def _recompute_in_backward(block: nn.Module) -> None:
    """Replace the block's forward, not the block: parameter names stay those of the published weights."""
    forward = block.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = recomputed
