"""Repairs of speculative decoding by vLLM's CPU build."""

from typing import Any

import torch
from torch import Tensor


def repair_drafts_on_cpu(device: torch.device) -> None:
    """Have drafts verified on a CPU as they are on a GPU.

    - The kernel that gives each draft token the temperature, top_k and top_p of its request writes them to a copy, so
      that the sampler reads memory that nobody has written. And top_k without any draft crashes the engine.
    - A request with one token to compute (a prompt of one token, or one whose other blocks are in the prefix cache) is
      padded with drafts of -1. The kernels would read the probability before the row and may accept the draft; the
      token that follows would be sampled at a later position than its own.

    Must be called in each worker. Without it tests/integration/inference/test_speculative_decoding.py fails.
    """
    if device.type != "cpu":
        return
    from vllm.v1.sample import rejection_sampler

    recover, reject = rejection_sampler._sample_recovered_tokens, rejection_sampler._rejection_random_sample

    def constrain(logits: Tensor, ends: Tensor, sampling: Any) -> Tensor:
        if sampling.all_greedy or not len(logits):
            return logits
        counts = _counts(ends)
        divisor = sampling.temperature.masked_fill(sampling.temperature == 0, 1).repeat_interleave(counts)
        limits = [each if each is None else each.repeat_interleave(counts) for each in (sampling.top_k, sampling.top_p)]
        return rejection_sampler.apply_top_k_top_p(logits / divisor[:, None], *limits)

    def recover_padded(out: Tensor, ends: Tensor, drafts: Tensor, *rest: Any, **options: Any) -> None:
        _, probabilities, noise = rest
        recover(out, ends, drafts.clamp(min=0), *rest, **options)
        rows = torch.arange(len(ends)).repeat_interleave(_counts(ends))
        if len(padded := (drafts < 0).nonzero()[:, 0]):
            out[padded] = (probabilities[padded] * noise[rows[padded]]).argmax(-1).to(out.dtype)

    def reject_padded(out: Tensor, ends: Tensor, drafts: Tensor, *rest: Any) -> None:
        *others, uniform, greedy, longest, rates = rest
        uniform = uniform.masked_fill(drafts < 0, 2)  # more than any probability
        reject(out, ends, drafts.clamp(min=0), *others, uniform, greedy, longest, rates)

    rejection_sampler.apply_sampling_constraints = constrain
    rejection_sampler._sample_recovered_tokens = recover_padded
    rejection_sampler._rejection_random_sample = reject_padded


def _counts(ends: Tensor) -> Tensor:
    return torch.diff(ends, prepend=ends.new_zeros(1))
