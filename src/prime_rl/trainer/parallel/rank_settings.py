"""Checks that ranks which were started on several nodes have the same settings (I9)."""

import os
import socket
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from prime_rl.configs.training.common import TrainingConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.parallel.process_group import World

_OF_A_NODE = {
    "output_dir", "exp_id", "log", "heartbeat", "wandb", "trackio", "tensorboard", "memory_profiler_path", "trace_path",
}  # fmt: skip
"""Keys that do not decide what is trained, and may differ: for example paths of mounts."""


def check_rank_settings(config: TrainingConfig, world: World) -> None:
    """Raise ConfigError on all ranks if one has other settings than rank 0. All ranks call it together.

    Each rank updates its own shards, so different settings, such as two learning rates, would train a mixture. One
    torchrun gives all its ranks the same settings, so those of one node are not compared.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == world.size:
        return
    own = config.model_dump(mode="json", exclude=_OF_A_NODE)
    main = [(f"rank 0 on {socket.gethostname()}", own)]
    dist.broadcast_object_list(main, src=0)
    place, expected = main[0]
    difference = None
    if (found := _find_difference(expected, own)) is not None:
        key, theirs, mine = found
        difference = f"{key} = {theirs} at {place} and {mine} at rank {world.rank} on {socket.gethostname()}"
    answers: list[str | None] = [None] * world.size
    dist.all_gather_object(answers, difference)
    first = next((answer for answer in answers if answer is not None), None)
    if first is not None:
        raise ConfigError(f"{first}; give all ranks the same")


def _find_difference(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> tuple[str, Any, Any] | None:
    """Return the first key with different values, with both values; the type of a block comes before its other keys."""
    for name in sorted(one.keys() | other.keys(), key=lambda name: (name != "type", name)):
        key, first, second = f"{prefix}{name}", one.get(name), other.get(name)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            if (found := _find_difference(first, second, f"{key}.")) is not None:
                return found
        elif first != second:
            return key, "set" if isinstance(first, Mapping) else first, "set" if isinstance(second, Mapping) else second
    return None
