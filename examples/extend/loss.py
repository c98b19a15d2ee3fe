"""A custom loss: REINFORCE with an importance ratio that is bounded on both sides.

    uv run --extra cpu rl @ configs/reverse_text/cpu.toml --trainer.loss.type custom \
        --trainer.loss.import-path examples.extend.loss:bounded_reinforce --trainer.loss.kwargs '{"bound": 2.0}'

A loss gets one packed row and returns one loss per token, [T]. The trainer weighs and sums them, so the function needs
no mean. `inputs.sampler_logprobs` may hold anything outside the mask: select with `torch.where`, never multiply by the
mask.
"""

import torch
from torch import Tensor

from prime_rl.trainer.losses.loss_inputs import LossInputs


def bounded_reinforce(inputs: LossInputs, bound: float = 2.0) -> Tensor:
    """Return -clip(r, 1 / bound, bound) A log p per token, with r = p / p_sampler without gradient; float32 [T]."""
    difference = torch.where(inputs.mask, inputs.logprobs.detach() - inputs.sampler_logprobs, 0.0)
    ratio = difference.clamp(-10.0, 10.0).exp().clamp(1.0 / bound, bound)
    return torch.where(inputs.mask, -ratio * inputs.advantages * inputs.logprobs, 0.0)
