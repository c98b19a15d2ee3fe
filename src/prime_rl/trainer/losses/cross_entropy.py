"""Cross-entropy: the loss of supervised fine-tuning, and of tokens that are to be imitated beside the RL loss."""

import torch
from torch import Tensor

from prime_rl.trainer.losses.base import finite


def cross_entropy(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Per token [T] -logprob, 0 outside the mask (bool [T])."""
    return torch.where(mask, -finite(logprobs), 0.0)
