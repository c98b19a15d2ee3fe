"""Packed samples as the model wants them: one row of tensors on the device, segments given by their boundaries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed samples of T tokens in one row; entry t of every [T] tensor describes token t.

    Attributes:
        tokens: int64 [T].
        position_ids: int64 [T], from 0 in every segment.
        segment_ids: int64 [T], 0, 1, ... in the order of the row.
        boundaries: int32 [segments + 1], 0 first and T last.
        longest: length of the longest segment.
        scored: int64 [M], the positions where `loss_mask` is set: only these meet the output embedding.
        loss_mask: bool [T], the tokens to train on; never the first of a segment, which nothing precedes.
        temperature: float32 [T].
        sampler_logprobs: float32 [T]; anything, also non-finite, outside the mask.
        advantages: float32 [T].
        on_policy: bool [T], set in segments whose every sampled token has the version that is being trained.
        top_k, top_p, min_p, rl_weights, ce_weights, ref_kl_weights, ref_logprobs: as in `prime_rl.run.batch.Batch`,
            [T]; None where the batch has no such stream.
        proximal_logprobs: float32 [T], the trainer's own at the step's start; None where no loss asked for them.
    """

    tokens: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    boundaries: Tensor
    longest: int
    scored: Tensor
    loss_mask: Tensor
    temperature: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    on_policy: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    rl_weights: Tensor | None = None
    ce_weights: Tensor | None = None
    ref_kl_weights: Tensor | None = None
    ref_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None

    def to(self, device: torch.device) -> Self:
        """Copy to `device`; the same object where it is there already."""
        if self.tokens.device == device:
            return self
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**{k: _move(v, device) if isinstance(v, Tensor) else v for k, v in values.items()})


def make_micro_batch(
    tokens: NDArray[np.integer],
    loss_mask: NDArray[np.generic],
    lengths: Sequence[int] | NDArray[np.integer],
    *,
    logprobs: NDArray[np.floating] | None = None,
    advantages: NDArray[np.floating] | None = None,
    temperature: NDArray[np.floating] | None = None,
    on_policy: NDArray[np.bool_] | None = None,
    streams: Mapping[str, NDArray[np.generic]] | None = None,
) -> MicroBatch:
    """Build a row from arrays of one length T; what is not given is 0, temperature 1.

    Args:
        tokens: [T].
        loss_mask: [T], non-zero where the token is trained on.
        lengths: tokens of each segment, in order; at least 1 each.
        logprobs: [T], the sampler's.
        advantages: [T].
        temperature: [T].
        on_policy: [T].
        streams: the optional streams by name, [T] each.

    Raises:
        ValueError: the first token of a segment is to be trained on.
    """
    length = len(tokens)
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    starts = boundaries[:-1]
    mask = np.asarray(loss_mask) != 0
    if mask[starts].any():
        raise ValueError("the first token of a segment has nothing before it and cannot be trained on")
    zeros = np.zeros(length, np.float32)
    return MicroBatch(
        tokens=torch.from_numpy(np.asarray(tokens, np.int64)),
        position_ids=torch.from_numpy(np.arange(length) - np.repeat(starts, lengths)),
        segment_ids=torch.from_numpy(np.repeat(np.arange(len(starts)), lengths)),
        boundaries=torch.from_numpy(boundaries.astype(np.int32)),
        longest=int(np.max(lengths)),
        scored=torch.from_numpy(np.flatnonzero(mask)),
        loss_mask=torch.from_numpy(mask),
        temperature=_floats(np.ones(length, np.float32) if temperature is None else temperature),
        sampler_logprobs=_floats(zeros if logprobs is None else logprobs),
        advantages=_floats(zeros if advantages is None else advantages),
        on_policy=torch.from_numpy(np.zeros(length, np.bool_) if on_policy is None else np.asarray(on_policy)),
        **{name: torch.from_numpy(np.array(values)) for name, values in (streams or {}).items()},
    )


def masked_row(streams: Mapping[str, np.dtype[Any]] | None = None) -> MicroBatch:
    """Make the smallest row that trains on nothing, to even out the ranks' counts of micro-batches.

    Args:
        streams: names and types of the optional streams that the other rows have, so that all ranks report the same
            means; 0 here.
    """
    nothing = np.zeros(2, np.int64)
    zeros = {name: np.zeros(2, dtype) for name, dtype in (streams or {}).items()}
    return make_micro_batch(nothing, nothing, [2], streams=zeros)


def _move(values: Tensor, device: torch.device) -> Tensor:
    """Copy; to CUDA from page-locked memory, since for any other the driver first waits for all work in the stream."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def _floats(values: NDArray[np.floating]) -> Tensor:
    return torch.from_numpy(np.array(values, np.float32))
