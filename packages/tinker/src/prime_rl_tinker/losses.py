"""Tinker's losses: sums over scored tokens, never normalised.

lp are log-probabilities of the targets at temperature 1, q the sampler's, A the advantages, r = exp(lp - q).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Arrays = Mapping[str, Tensor]
Options = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LossFunction:
    """A loss by name.

    Attributes:
        inputs: required inputs besides `target_tokens`, of the same shape.
        optional: inputs that are 1 where they are absent.
        options: name in `loss_fn_config` -> default.
        compute: (lp [M], inputs, options) -> losses [M].
    """

    inputs: tuple[str, ...]
    optional: tuple[str, ...]
    options: Mapping[str, float]
    compute: Callable[[Tensor, Arrays, Options], Tensor]


def _cross_entropy(lp: Tensor, arrays: Arrays, options: Options) -> Tensor:
    """-w lp; with several targets per position, w are soft labels."""
    return -arrays["weights"] * lp


def _importance_sampling(lp: Tensor, arrays: Arrays, options: Options) -> Tensor:
    """-r A."""
    return -_ratio(lp, arrays) * arrays["advantages"]


def _ppo(lp: Tensor, arrays: Arrays, options: Options) -> Tensor:
    """-min(r A, clip(r) A) (Schulman et al. 2017, arXiv:1707.06347, equation 7); the thresholds are ratios."""
    ratio, advantages = _ratio(lp, arrays), arrays["advantages"]
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _cispo(lp: Tensor, arrays: Arrays, options: Options) -> Tensor:
    """-stopgrad(clip(r)) lp A (MiniMax 2025, arXiv:2506.13585, equation 4)."""
    ratio = _ratio(lp, arrays).detach().clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -ratio * lp * arrays["advantages"]


def _dro(lp: Tensor, arrays: Arrays, options: Options) -> Tensor:
    """-(lp A - beta / 2 (lp - q)^2) (Richemond et al. 2024, arXiv:2405.19107)."""
    return options["beta"] / 2 * (lp - arrays["logprobs"]) ** 2 - lp * arrays["advantages"]


def _ratio(lp: Tensor, arrays: Arrays) -> Tensor:
    # A token without advantage must not make 0 * inf.
    difference = torch.where(arrays["advantages"] == 0, lp - lp.detach(), lp - arrays["logprobs"])
    return difference.exp()


_POLICY_GRADIENT = ("logprobs", "advantages")
LOSSES: dict[str, LossFunction] = {
    "cross_entropy": LossFunction((), ("weights",), {}, _cross_entropy),
    "importance_sampling": LossFunction(_POLICY_GRADIENT, (), {}, _importance_sampling),
    "ppo": LossFunction(_POLICY_GRADIENT, (), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, _ppo),
    "cispo": LossFunction(_POLICY_GRADIENT, (), {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, _cispo),
    "dro": LossFunction(_POLICY_GRADIENT, (), {"beta": 0.05}, _dro),
}
"""By `loss_fn`. The defaults of cispo are those of the public documentation; dro's beta has no published default."""
