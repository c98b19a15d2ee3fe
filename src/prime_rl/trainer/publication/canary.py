"""I5, I6: what the policy itself says about a few fixed tokens, so that inference can tell whether it has loaded it."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from prime_rl.trainer.micro_batch import MicroBatch, make_micro_batch
from prime_rl.trainer.model import PolicyModel

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
