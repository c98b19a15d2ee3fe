"""Rejection of padded drafts by vLLM's kernels for a CPU."""

from typing import Any

import torch
from torch import Tensor


def reject_padded_drafts_on_cpu(device: torch.device) -> None:
    """Have drafts of -1 rejected on a CPU, as they are on a GPU.

    A request with one token to compute (a prompt of one token, or one whose other blocks are in the prefix cache) is
    padded with them. vLLM's kernels would read the probability before the row and may accept the draft; the token that
    follows would be sampled at a later position than its own.

    Must be called in each worker. Without it tests/integration/inference/test_speculative_decoding.py fails.
    """
    if device.type != "cpu":
        return
    from vllm.v1.sample import rejection_sampler

    recover, reject = rejection_sampler._sample_recovered_tokens, rejection_sampler._rejection_random_sample

    def recover_padded(out: Tensor, ends: Tensor, drafts: Tensor, *rest: Any, **k: Any) -> None:
        _, probs, noise = rest
        recover(out, ends, drafts.clamp(min=0), *rest, **k)
        rows = torch.arange(len(ends)).repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1)))
        if len(padded := (drafts < 0).nonzero()[:, 0]):
            out[padded] = (probs[padded] * noise[rows[padded]]).argmax(-1).to(out.dtype)

    def reject_padded(out: Tensor, ends: Tensor, drafts: Tensor, *rest: Any) -> None:
        *others, uniform, greedy, longest, rates = rest
        uniform = uniform.masked_fill(drafts < 0, 2)  # more than any probability
        reject(out, ends, drafts.clamp(min=0), *others, uniform, greedy, longest, rates)

    rejection_sampler._sample_recovered_tokens = recover_padded
    rejection_sampler._rejection_random_sample = reject_padded
