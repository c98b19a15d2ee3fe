"""I9 world size is invisible: what each token of a row weighs in the loss, from counts over all ranks."""

from typing import Literal

import torch
from torch import Tensor

from prime_rl.trainer.engine import Counts
from prime_rl.trainer.losses.base import sequence_lengths

Normalization = Literal["token", "sequence", "fixed"]


def token_weights(
    mask: Tensor, segment_ids: Tensor, counts: Counts, normalization: Normalization, fixed_length: int
) -> Tensor:
    """Weigh the tokens of a row [T]; summed over a minibatch on all ranks the weights are at most 1.

    - token: 1 / N, N the trained tokens of the minibatch: the mean over tokens.
    - sequence: 1 / (S n_s), n_s the trained tokens of the token's sequence, S the sequences of the minibatch: the mean
      over sequences of their means.
    - fixed: 1 / (S L), L = `fixed_length`: sums of sequences over a constant, whatever their lengths.

    Args:
        mask: bool [T], the trained tokens, before any mask that a loss adds.
        segment_ids: int64 [T].
        counts: N and S, over all ranks.
        normalization: which of the three.
        fixed_length: L, tokens.
    """
    if normalization == "token":
        share = torch.full(mask.shape, 1 / counts.tokens, device=mask.device)
    elif normalization == "sequence":
        share = 1 / (counts.sequences * sequence_lengths(mask, segment_ids))
    else:
        share = torch.full(mask.shape, 1 / (counts.sequences * fixed_length), device=mask.device)
    return torch.where(mask, share, 0.0)
