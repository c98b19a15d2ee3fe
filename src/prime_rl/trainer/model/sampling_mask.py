"""The tokens that top-k, top-p and min-p keep, as the sampler computes them (I6).

vLLM applies temperature, then min-p, top-k and top-p, each to the remaining distribution (`Sampler.sample`,
`MinPLogitsProcessor` and `apply_top_k_top_p` of vLLM 0.32). Each keeps the most likely tokens, so together they keep
the tokens above one threshold, which is computed here.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from prime_rl.trainer.micro_batch import MicroBatch

# Without top-k, the nucleus is searched among this many tokens before all are sorted.
_NUCLEUS = 1024


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """The sampler's parameters for each of N tokens."""

    top_k: Tensor  # int [N], number of the most likely tokens to keep, and ties of the last one; 0 keeps all
    top_p: Tensor  # float32 [N], keep the fewest most likely tokens with at least this mass; 1 keeps all
    min_p: Tensor  # float32 [N], keep tokens at least this likely relative to the most likely one; 0 keeps all

    @classmethod
    def of(cls, row: MicroBatch) -> Self | None:
        """Return the parameters of all tokens of a row; None if it has none."""
        if row.top_k is None and row.top_p is None and row.min_p is None:
            return None
        zeros = torch.zeros_like(row.temperature)
        return cls(
            top_k=zeros.int() if row.top_k is None else row.top_k,
            top_p=zeros + 1 if row.top_p is None else row.top_p,
            min_p=zeros if row.min_p is None else row.min_p,
        )

    def __getitem__(self, index: slice | Tensor) -> "SamplingMask":
        return SamplingMask(self.top_k[index], self.top_p[index], self.min_p[index])

    @property
    def active(self) -> Tensor:
        """Whether any token is masked, bool [N]."""
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)


def kept_threshold(logits: Tensor, mask: SamplingMask) -> Tensor:
    """Return the threshold float32 [N] of `logits` [N, V], divided by the temperature: lower logits are masked.

    The threshold lies between the last kept logit and the first masked one, so recomputed logits, which may differ in
    the last bit, give the same mask. It is -inf if all tokens are kept. Ties of the last kept token are kept; vLLM does
    the same for top-k on a CPU, and otherwise keeps an arbitrary part of them.
    """
    result = torch.full((len(logits),), -torch.inf, device=logits.device)
    rows = mask.active.nonzero()[:, 0]
    if len(rows):
        result[rows] = _find_threshold(logits[rows], mask[rows])
    return result


def _find_threshold(logits: Tensor, mask: SamplingMask) -> Tensor:
    vocabulary = logits.shape[1]
    top_k = mask.top_k.long()
    top_k = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    widest = int(top_k.max())
    width = min(vocabulary, 1 + (widest if widest < vocabulary else _NUCLEUS))
    while True:
        top = logits.topk(width).values
        last = _lowest_kept_logit(top, logits, top_k, mask)
        kept = (top >= last[:, None]).sum(-1)
        if width == vocabulary or bool((kept < width).all()):
            break
        width = vocabulary  # more tokens are kept than were searched
    following = top.gather(1, kept.clamp(max=width - 1)[:, None])[:, 0]
    middle = ((last.double() + following.double()) / 2).float()
    middle = torch.maximum(middle, torch.nextafter(following, last))  # there is no float between neighbours
    return torch.where(kept == width, -torch.inf, middle)


def _lowest_kept_logit(top: Tensor, logits: Tensor, top_k: Tensor, mask: SamplingMask) -> Tensor:
    """Return the lowest kept logit [N], searched among the highest logits `top`."""
    best, vocabulary = top[:, :1], logits.shape[1]
    by_min_p = best + mask.min_p.log()[:, None]
    by_top_k = top.gather(1, (top_k - 1).clamp(max=top.shape[1] - 1)[:, None])
    by_top_k = torch.where(top_k[:, None] < vocabulary, by_top_k, -torch.inf)
    lowest = torch.maximum(by_min_p, by_top_k)
    mass = torch.where(top >= lowest, (top - best).double().exp(), 0.0)
    total = mass.sum(-1, keepdim=True)
    if bool((top[:, -1:] >= lowest).any()):  # the tail also has mass
        total = torch.where(logits >= lowest, (logits - best).exp(), 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    before = mass.cumsum(-1) - mass
    top_p = mask.top_p.double()[:, None]
    inside = (top >= lowest) & ((before < top_p * total) | (top_p >= 1))
    return top.gather(1, inside.sum(-1, keepdim=True).clamp(min=1) - 1)[:, 0]
