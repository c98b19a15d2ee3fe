"""I5, I6: what the policy itself says about a few fixed tokens, so that inference can tell whether it has loaded it.

On a CPU, where a forward pass over 64 tokens takes as long as a good part of the writing, a lone process scores them in
a thread while the next step runs. Sharded modules cannot run twice at the same time: gathering weights is a state of
theirs. So the thread has modules of its own, over the very same weights (`plain_twin`).
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.trainer.lora import add_adapters
from prime_rl.trainer.micro_batch import MicroBatch, make_micro_batch
from prime_rl.trainer.model import PolicyModel, build_policy
from prime_rl.trainer.parallel import World

_TOKENS = 64


def canary_row(vocabulary: int) -> MicroBatch:
    """Draw the tokens: the same for every model with so many."""
    tokens = np.random.default_rng(vocabulary).integers(0, vocabulary, _TOKENS)
    return make_micro_batch(tokens, np.arange(_TOKENS) > 0, [_TOKENS])


@torch.no_grad()
def measure_canary(policy: PolicyModel, row: MicroBatch) -> Callable[[], list[float]]:
    """Score the tokens of `row` at temperature 1, as training does. All ranks call it together.

    Returns:
        What waits for the device and gives [T - 1]: of each token but the first given those before. It may be called in
        another thread, and does not wait for work that is queued later.
    """
    logprobs: Tensor = policy(row)[0][1:]
    for module in policy.modules():
        if isinstance(module, FSDPModule):  # no backward pass follows that would give the gathered weights back
            module.reshard()
    if not logprobs.is_cuda:
        return logprobs.tolist
    host = torch.empty_like(logprobs, device="cpu", pin_memory=True).copy_(logprobs, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return list(host.tolist())

    return read


def plain_twin(policy: PolicyModel, config: TrainerModelConfig, world: World, dtype: torch.dtype) -> PolicyModel | None:
    """Make the same model once more, not sharded, over the storage of the sharded one's weights.

    An update in place changes both. It may score a row while the policy itself does something else, as long as no
    update runs.

    Args:
        policy: sharded and loaded.
        config: by which it was made.
        world: the ranks that hold the shards.
        dtype: precision of the policy's forward pass.

    Returns:
        None where a shard is not the whole weight, or not what forward computes with, or on a device that takes its
        work in order, where a thread would gain nothing.
    """
    if world.size > 1 or world.device.type != "cpu":
        return None
    if any(parameter.is_floating_point() and parameter.dtype != dtype for parameter in policy.parameters()):
        return None
    twin = build_policy(config)
    if config.lora is not None:
        add_adapters(twin, config.lora, dtype)
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        twin.get_submodule(owner)._parameters[leaf] = nn.Parameter(local.detach(), requires_grad=False)
    for name, buffer in policy.named_buffers(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        twin.get_submodule(owner)._buffers[leaf] = buffer
    return twin
