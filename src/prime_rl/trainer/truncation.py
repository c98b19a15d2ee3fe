"""I6 agreement where the sampler cut its distribution: which tokens top-k, top-p and min-p keep.

vLLM's order: temperature, then min-p, then top-k, then top-p, each over the distribution that the one before it left
(`Sampler.sample`, `MinPLogitsProcessor` and `apply_top_k_top_p` of vLLM 0.32). Every one of them keeps the likeliest
tokens, so together they keep the tokens from some logit upwards, and that logit is all that is computed here.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from prime_rl.trainer.micro_batch import MicroBatch

# Where top-k does not say how far to look, a nucleus is looked for among so many tokens before all are sorted.
_NUCLEUS = 1024


@dataclass(frozen=True, slots=True)
class Truncation:
    """How the sampler cut the distribution of each of N tokens.

    Attributes:
        top_k: int [N], keep so many of the likeliest tokens, and those as likely as the last of them; 0 keeps all.
        top_p: float32 [N], keep the fewest likeliest tokens whose mass is at least this; 1 keeps all.
        min_p: float32 [N], keep tokens at least this likely relative to the likeliest; 0 keeps all.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, row: MicroBatch) -> Self | None:
        """Take the streams of all tokens of a row; None where it has none."""
        if row.top_k is None and row.top_p is None and row.min_p is None:
            return None
        zeros = torch.zeros_like(row.temperature)
        return cls(
            top_k=zeros.int() if row.top_k is None else row.top_k,
            top_p=zeros + 1 if row.top_p is None else row.top_p,
            min_p=zeros if row.min_p is None else row.min_p,
        )

    def __getitem__(self, index: slice | Tensor) -> "Truncation":
        return Truncation(self.top_k[index], self.top_p[index], self.min_p[index])

    @property
    def active(self) -> Tensor:
        """Whether anything is cut, bool [N]."""
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)


def lowest_kept(logits: Tensor, truncation: Truncation) -> Tensor:
    """Find the logit that divides what is kept from what is not: a token is kept if its logit is not below it.

    It lies half-way between the last token kept and the first that is not, so logits that are computed again, and
    differ in the last bit, divide in the same way. Tokens that are exactly as likely as the last one kept are kept;
    vLLM does the same at top-k on a CPU, and elsewhere keeps some of them by an order of its own.

    Args:
        logits: float32 [N, V], divided by the temperature.
        truncation: of N tokens.

    Returns:
        float32 [N]; -inf where all are kept.
    """
    result = torch.full((len(logits),), -torch.inf, device=logits.device)
    rows = truncation.active.nonzero()[:, 0]
    if len(rows):
        result[rows] = _divide(logits[rows], truncation[rows])
    return result


def _divide(logits: Tensor, truncation: Truncation) -> Tensor:
    vocabulary = logits.shape[1]
    top_k = truncation.top_k.long()
    top_k = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    widest = int(top_k.max())
    width = min(vocabulary, 1 + (widest if widest < vocabulary else _NUCLEUS))
    while True:
        top = logits.topk(width).values
        last = _last_kept(top, logits, top_k, truncation)
        kept = (top >= last[:, None]).sum(-1)
        if width == vocabulary or bool((kept < width).all()):
            break
        width = vocabulary  # the set is wider than where it was looked for
    following = top.gather(1, kept.clamp(max=width - 1)[:, None])[:, 0]
    middle = ((last.double() + following.double()) / 2).float()
    middle = torch.maximum(middle, torch.nextafter(following, last))  # neighbouring floats have nothing between them
    return torch.where(kept == width, -torch.inf, middle)


def _last_kept(top: Tensor, logits: Tensor, top_k: Tensor, truncation: Truncation) -> Tensor:
    """Return the logit of the least likely token that is kept [N], as far as it is among the likeliest, `top`."""
    best, vocabulary = top[:, :1], logits.shape[1]
    by_min_p = best + truncation.min_p.log()[:, None]
    by_top_k = top.gather(1, (top_k - 1).clamp(max=top.shape[1] - 1)[:, None])
    by_top_k = torch.where(top_k[:, None] < vocabulary, by_top_k, -torch.inf)
    lowest = torch.maximum(by_min_p, by_top_k)
    mass = torch.where(top >= lowest, (top - best).double().exp(), 0.0)
    total = mass.sum(-1, keepdim=True)
    if bool((top[:, -1:] >= lowest).any()):  # the tail counts as well
        total = torch.where(logits >= lowest, (logits - best).exp(), 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    before = mass.cumsum(-1) - mass
    top_p = truncation.top_p.double()[:, None]
    inside = (top >= lowest) & ((before < top_p * total) | (top_p >= 1))
    return top.gather(1, inside.sum(-1, keepdim=True).clamp(min=1) - 1)[:, 0]
