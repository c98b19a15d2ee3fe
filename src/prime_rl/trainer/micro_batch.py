"""Packed samples as the model's input: rows of tensors with the boundaries of segments, and the rows of each rank."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed samples of T tokens in one row; entry t of every [T] tensor describes token t."""

    tokens: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T], from 0 in every segment
    segment_ids: Tensor  # int64 [T], 0, 1, ... in the order of the row.
    boundaries: Tensor  # int32 [segments + 1], 0 first and T last
    longest: int  # length of the longest segment
    scored: Tensor  # int64 [M], the positions where `loss_mask` is set; only these use the output embedding
    scored_on_host: NDArray[np.int64]  # the same positions on the host, which avoids reads from the device
    loss_mask: Tensor  # bool [T], the tokens to train on; never the first token of a segment
    temperature: Tensor  # float32 [T]
    sampler_logprobs: Tensor  # float32 [T]; arbitrary, also non-finite, outside the mask
    advantages: Tensor  # float32 [T]
    on_policy: Tensor  # bool [T], set in segments whose sampled tokens all have the current version
    # as in `prime_rl.storage.batch.Batch`, [T]; None if the batch has no such stream
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    rl_weights: Tensor | None = None
    ce_weights: Tensor | None = None
    ref_kl_weights: Tensor | None = None
    ref_logprobs: Tensor | None = None
    routed_experts: Tensor | None = None  # uint8 or int16 [T, L, k]
    # float32 [T], of the trainer at the step's start; None if the loss does not need them
    proximal_logprobs: Tensor | None = None
    # bool [T], the tokens with a policy gradient; None: all of the mask
    policy_gradient: Tensor | None = None
    positions: NDArray[np.int64] | None = None  # [T], index of each token in the batch; None outside a batch

    def to(self, device: torch.device) -> Self:
        """Copy to `device`; return the same object if it is already there."""
        if self.tokens.device == device:
            return self
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**{k: _move(v, device) if isinstance(v, Tensor) else v for k, v in values.items()})


@dataclass(frozen=True, slots=True)
class TargetRow:
    """Packed samples of T tokens in one row, and any M (position, token) pairs to score."""

    tokens: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T], from 0 in every segment
    boundaries: Tensor  # int32 [segments + 1], 0 first and T last
    longest: int  # length of the longest segment
    positions: Tensor  # int64 [M], tokens whose states predict the targets; may repeat
    targets: Tensor  # int64 [M], token ids

    def to(self, device: torch.device) -> Self:
        """Copy to `device`."""
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
    positions: NDArray[np.int64] | None = None,
) -> MicroBatch:
    """Build a row from arrays [T]; the default temperature is 1, other defaults are 0.

    `loss_mask` is non-zero where the token is trained on, `lengths` are the tokens of each segment (at least 1),
    `logprobs` are the sampler's, `streams` the optional streams by name, and `positions` the indices of the tokens in
    the batch. Raises ValueError if the first token of a segment is to be trained on.
    """
    length = len(tokens)
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    starts = boundaries[:-1]
    mask = np.asarray(loss_mask) != 0
    if mask[starts].any():
        raise ValueError("the first token of a segment has no context and cannot be trained on")
    zeros = np.zeros(length, np.float32)
    scored = np.flatnonzero(mask)
    return MicroBatch(
        tokens=torch.from_numpy(np.asarray(tokens, np.int64)),
        position_ids=torch.from_numpy(np.arange(length) - np.repeat(starts, lengths)),
        segment_ids=torch.from_numpy(np.repeat(np.arange(len(starts)), lengths)),
        boundaries=torch.from_numpy(boundaries.astype(np.int32)),
        longest=int(np.max(lengths)),
        scored=torch.from_numpy(scored),
        scored_on_host=scored,
        loss_mask=torch.from_numpy(mask),
        temperature=_floats(np.ones(length, np.float32) if temperature is None else temperature),
        sampler_logprobs=_floats(zeros if logprobs is None else logprobs),
        advantages=_floats(zeros if advantages is None else advantages),
        on_policy=torch.from_numpy(np.zeros(length, np.bool_) if on_policy is None else np.asarray(on_policy)),
        **{name: _stream(values) for name, values in (streams or {}).items()},
        positions=positions,
    )


def masked_row(streams: Mapping[str, NDArray[np.generic]] | None = None) -> MicroBatch:
    """Return the smallest row without trained tokens, which pads the number of micro-batches of a rank.

    Its two samples of one token predict nothing, so that it does not count in the metrics of router replay. `streams`
    are the other rows' optional streams, of any number of tokens, so that all ranks report the same means.
    """
    nothing = np.zeros(2, np.int64)
    zeros = {name: np.zeros((2, *array.shape[1:]), array.dtype) for name, array in (streams or {}).items()}
    return make_micro_batch(nothing, nothing, [1, 1], streams=zeros)


def _move(values: Tensor, device: torch.device) -> Tensor:
    """Copy to `device`; to CUDA from pinned memory, because other copies first wait for all work in the stream.

    Tensors on another device, such as the log-probabilities of a reference model, cannot be pinned.
    """
    from_host = device.type == "cuda" and values.device.type == "cpu"
    return (values.pin_memory() if from_host else values).to(device, non_blocking=True)


def _stream(values: NDArray[np.generic]) -> Tensor:
    """Copy a stream; uint16 becomes int16 of the same bits, because torch has few operations on uint16."""
    return torch.from_numpy(np.array(values.view(np.int16) if values.dtype == np.uint16 else values))


def _floats(values: NDArray[np.floating]) -> Tensor:
    return torch.from_numpy(np.array(values, np.float32))


PADDING_ROW = -1
"""Row index of a fully masked row that `assign_rows` adds to give all ranks the same count."""


def assign_rows(costs: Sequence[float] | NDArray[np.floating[Any]], world: int, turn: int = 0) -> list[list[int]]:
    """Assign each row to one rank, with equal counts and balanced cost.

    Ranks that shard a model wait for each other in every forward pass, so the i-th rows of all ranks should have
    similar costs, in addition to the sums. This is the balanced differencing method (Michiels, Korst, Aarts and van
    Leeuwen 2003, "Performance ratios for the differencing method applied to the balanced number partitioning problem"):
    sorted by cost, every `world` rows form a round with one row per rank. Then the two rounds with the largest spread
    are merged, the largest of one with the smallest of the other, until one is left.

    The largest sum is at most 2 - 1 / world times the optimum with equal counts, and exceeds the smallest sum by at
    most the largest spread of a round.

    Rank `turn` modulo `world` gets the largest sum, the next rank the second largest, and so on: with the number of the
    step as `turn`, uneven rows do not make one rank slow in every step.

    `costs` [R] are not negative. Returns ascending row indices by rank; shorter lists are padded with `PADDING_ROW`. If
    the rows are sorted by descending cost, the i-th rows of all ranks belong to one round.
    """
    order = sorted(range(len(costs)), key=lambda row: (-float(costs[row]), row))
    rounds = []
    for start in range(0, len(order), world):
        shares = [(float(costs[row]), [row]) for row in order[start : start + world]]
        shares += [(0.0, [])] * (world - len(shares))
        rounds.append((shares[-1][0] - shares[0][0], start, shares))  # minus the spread, since a heap pops the smallest
    heapq.heapify(rounds)
    while len(rounds) > 1:
        _, start, one = heapq.heappop(rounds)
        _, _, other = heapq.heappop(rounds)
        sums = [(a + b, rows + more) for (a, rows), (b, more) in zip(one, reversed(other), strict=True)]
        shares = sorted(sums, key=lambda share: (-share[0], share[1]))
        heapq.heappush(rounds, (shares[-1][0] - shares[0][0], start, shares))
    assigned = [rows for _, rows in rounds[0][2]] if rounds else [[] for _ in range(world)]
    count = -(-len(costs) // world)
    padded = [sorted(rows) + [PADDING_ROW] * (count - len(rows)) for rows in assigned]
    return [padded[(rank - turn) % world] for rank in range(world)]
