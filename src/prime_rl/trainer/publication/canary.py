"""I5, I6: what the policy itself says about a few fixed tokens, so that inference can tell whether it has loaded it."""

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
def measure_canary(policy: PolicyModel, row: MicroBatch) -> Tensor:
    """Score the tokens of `row` at temperature 1, as training does. All ranks call it together.

    Returns:
        float32 [T - 1]: of each token but the first given those before; on the policy's device, which may not be done.
    """
    logprobs: Tensor = policy(row)[0][1:]
    for module in policy.modules():
        if isinstance(module, FSDPModule):  # no backward pass follows that would give the gathered weights back
            module.reshard()
    return logprobs
