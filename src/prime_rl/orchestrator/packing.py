"""Packs the samples of a batch into rows of at most `seq_len` tokens and similar cost, without padding.

The cost of a sample is the trainer's FLOPs, estimated from the model's config.json without torch or transformers.
"""

import json
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_rl.configs.base_model import NameConfig
from prime_rl.core.errors import ConfigError, RunError, summarize_exception
from prime_rl.core.types import Group, Sample
from prime_rl.storage.batch import Batch
from prime_rl.storage.model_files import find_model

_FEWEST_ROWS = 16
_ROW_MULTIPLE = 8
_ROUNDING = 1 / 16
"""Share of additional rows that is allowed to make their number divisible by a higher power of two."""
_BACKWARD_AND_FORWARD = 3
"""The backward pass has two matrix products for each one of the forward pass."""


@dataclass(frozen=True, slots=True)
class RowCost:
    """FLOPs of forward and backward over a sample: linear in its tokens, except for attention.

    Attributes:
        body: per token, in the matrices of the blocks; of the experts only the active ones.
        head: per trained token, in the output embedding.
        attention: per pair of tokens, over the layers with full attention.
        windowed: the same, over the layers with sliding attention.
        window: size of the sliding window in tokens.
    """

    body: float
    head: float = 0.0
    attention: float = 0.0
    windowed: float = 0.0
    window: int = 0

    def __call__(self, lengths: NDArray[np.integer], trained: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return the cost of each sample, float64 [S], from its tokens and how many of them are trained on."""
        tokens = lengths.astype(np.float64)
        seen = np.minimum(tokens, self.window)
        pairs, near = tokens**2 / 2, seen * tokens - seen**2 / 2
        return self.body * tokens + self.head * trained + self.attention * pairs + self.windowed * near

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> Self:
        """Count the FLOPs of the language model in a config.json; any error if it lacks the usual keys."""
        hidden, layers, heads = text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"]
        width = text.get("head_dim") or hidden // heads
        key_value_heads = text.get("num_key_value_heads") or heads
        projections = 2 * hidden * width * (heads + key_value_heads)
        matrices = layers * projections + sum(_feed_forward(text, layer) for layer in range(layers))
        kinds = _attention_kinds(text)
        products = 2 * _BACKWARD_AND_FORWARD
        return cls(
            body=float(products * matrices),
            head=float(products * hidden * text["vocab_size"]),
            attention=float(2 * products * heads * width * kinds.count("full_attention")),
            windowed=float(2 * products * heads * width * kinds.count("sliding_attention")),
            window=int(text.get("sliding_window") or 0),
        )


TOKENS = RowCost(body=1.0)
"""Counts tokens, if the model is unknown."""


def row_cost(config: Mapping[str, Any]) -> RowCost:
    """Return the cost for a config.json; if it does not describe a transformer, count tokens and log a warning."""
    try:
        return RowCost.of(config)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        logger.warning("rows are balanced by tokens: {} in the model's config.json", summarize_exception(error))
        return TOKENS


def _feed_forward(text: Mapping[str, Any], layer: int) -> int:
    """Return the active weights of one feed-forward block: gate, up and down; of experts also the router."""
    hidden = text["hidden_size"]
    experts = next((text[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if text.get(key)), 0)
    dense = (
        layer < text.get("first_k_dense_replace", 0)
        or layer in (text.get("mlp_only_layers") or ())
        or (layer + 1) % (text.get("decoder_sparse_step") or 1)
    )
    if not experts or dense:
        return int(3 * hidden * text["intermediate_size"])
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    shared = text.get("shared_expert_intermediate_size") or width * (text.get("n_shared_experts") or 0)
    return int(hidden * (3 * (width * text["num_experts_per_tok"] + shared) + experts))


def _attention_kinds(text: Mapping[str, Any]) -> list[str]:
    """Return the attention type of each layer as in transformers; linear attention has no token pairs."""
    if text.get("layer_types"):
        return list(text["layer_types"])
    windowed = text.get("sliding_window") and text.get("use_sliding_window", True)
    return ["sliding_attention" if windowed else "full_attention"] * int(text["num_hidden_layers"])


def read_model_config(model: NameConfig) -> Mapping[str, Any]:
    """Return the configuration of the language model in a local directory or on the Hugging Face hub.

    The configuration only improves estimates: if it cannot be read, the result is empty, with a warning.
    """
    try:
        directory = find_model(model.name, model.revision, model.download_timeout_seconds, with_weights=False)
        config = json.loads((directory / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError("config.json is not a JSON object")
    except (OSError, ValueError, ConfigError, RunError) as error:
        logger.warning("config.json of {} cannot be read: {}", model.name, summarize_exception(error))
        return {}
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Return the size of the vocabulary; None if config.json does not contain it."""
    size = config.get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def pack(
    groups: Sequence[Group],
    advantages: Sequence[NDArray[np.float64]],
    seq_len: int,
    cost: RowCost = TOKENS,
    mask_truncated: bool = False,
) -> Batch:
    """Build the batch of finished groups; its rows have at most `seq_len` tokens and are sorted by descending cost.

    Args:
        groups: finished groups.
        advantages: for each group float64 [P], of the parts of its rollouts (`part_advantages`). Each sampled token
            gets that of its part.
        seq_len: longest row in tokens; ValueError if a sample is longer.
        cost: of a sample for the trainer.
        mask_truncated: mask all tokens of rollouts, or of agents, with a completion that was cut by its token limit.
    """
    items = [
        (sample, group, index, values[start:])
        for group, values in zip(groups, advantages, strict=True)
        for index, (rollout, start) in enumerate(zip(group.rollouts, group.part_offsets, strict=False))
        for sample in rollout.samples
    ]
    masks = [
        np.zeros(len(sample), np.uint8)
        if mask_truncated and group.rollouts[index].is_sample_truncated(sample)
        else (sample.loss_mask & (np.arange(len(sample)) > 0)).astype(np.uint8)  # the first token has no context
        for sample, group, index, _ in items
    ]
    lengths = [len(sample) for sample, *_ in items]
    costs = cost(np.array(lengths, np.int64), np.array([mask.sum() for mask in masks], np.int64))
    rows = even_rows(lengths, costs.tolist(), seq_len)
    order = [item for row in rows for item in row]
    ordered = [items[item] for item in order]
    samples = [sample for sample, *_ in ordered]
    seq_lens = np.array([lengths[item] for item in order], np.int32)
    mask = np.concatenate([masks[item] for item in order])
    parts = [(len(sample), values[0 if sample.credits is None else sample.credits]) for sample, *_, values in ordered]
    per_token = np.concatenate([np.broadcast_to(values, size) for size, values in parts])
    temperatures = np.array([group.temperature for _, group, *_ in ordered], np.float32)
    return Batch(
        tokens=np.concatenate([sample.tokens for sample in samples]),
        loss_mask=mask,
        logprobs=np.concatenate([sample.logprobs for sample in samples]),
        advantages=np.where(mask == 1, per_token, 0).astype(np.float32),
        versions=np.concatenate([sample.versions for sample in samples]),
        temperature=np.repeat(temperatures, seq_lens),
        segment_ids=np.repeat(np.concatenate([np.arange(len(row)) for row in rows]), seq_lens).astype(np.int32),
        row_offsets=np.cumsum([0, *(sum(lengths[item] for item in row) for row in rows)]).astype(np.int64),
        row_cost=np.array([costs[row].sum() for row in rows], np.float32),
        seq_lens=seq_lens,
        sample_group=np.array([group.group_id for _, group, *_ in ordered], np.int64),
        sample_rollout=np.array([index for _, _, index, _ in ordered], np.int32),
        **_truncation([group for _, group, *_ in ordered], seq_lens),
        routed_experts=_routed_experts(samples),
    )


def even_rows(lengths: Sequence[int], costs: Sequence[float], capacity: int) -> list[list[int]]:
    """Pack items into rows of similar cost, slightly more than the minimum, for any common number of ranks.

    The number of ranks is unknown here. With twelve full rows, four of eight ranks would be idle half of the time; with
    sixteen rows of equal cost none is, and the trainer concatenates rows that fit together. So the number of rows is
    rounded up to a multiple of eight, at least sixteen, and to a multiple of a higher power of two if that is near.

    Returns the indices of the items of each row, by descending cost. With fewer items than rows, each has its own row.
    """
    fewest = best_fit_decreasing(lengths, capacity)
    count = _round_number(len(fewest))
    rows = None
    while rows is None and count < len(lengths):
        rows = _cheapest_fit(lengths, costs, capacity, count)
        if rows is None and count == len(fewest):
            rows = fewest  # the number is round already, and the rows are too full to be balanced
        count = _round_number(count + 1)
    if rows is None:
        rows = [[item] for item in range(len(lengths))]
    return sorted(rows, key=lambda row: (-sum(costs[item] for item in row), row))


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items, the longest first, each into the fullest row of `capacity` tokens that fits: O(n log n).

    At most 11/9 of the optimum + 6/9 rows (Johnson 1973; Dosa 2007), in practice the optimum.

    Returns the indices of the items of each row. Raises ValueError if an item is larger than a row.
    """
    if lengths and max(lengths) > capacity:
        raise ValueError(f"a sample of {max(lengths)} tokens does not fit into a row of {capacity}")
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(free, (lengths[item], -1))
        if place < len(free):
            free_tokens, row = free.pop(place)
        else:
            free_tokens, row = capacity, len(rows)
            rows.append([])
        rows[row].append(item)
        insort(free, (free_tokens - lengths[item], row))
    return rows


def _truncation(groups: Sequence[Group], seq_lens: NDArray[np.int32]) -> dict[str, Any]:
    """Return the sampler's truncation per token; parameters that truncated nothing are omitted."""
    cuts = {
        "top_k": np.array([group.top_k for group in groups], np.int32),
        "top_p": np.array([group.top_p for group in groups], np.float32),
        "min_p": np.array([group.min_p for group in groups], np.float32),
    }
    neutral = {"top_k": 0, "top_p": 1, "min_p": 0}
    return {name: np.repeat(cut, seq_lens) for name, cut in cuts.items() if (cut != neutral[name]).any()}


def _routed_experts(samples: Sequence[Sample]) -> NDArray[Any] | None:
    """Return the routes of all tokens, zeros where none are recorded; None without any."""
    recorded = [sample.routes.array for sample in samples if sample.routes is not None]
    if not recorded:
        return None
    shape, dtype = recorded[0].shape[1:], recorded[0].dtype
    parts = [np.zeros((len(s), *shape), dtype) if s.routes is None else s.routes.array for s in samples]
    return np.concatenate(parts)


def _round_number(count: int) -> int:
    multiple, count = _ROW_MULTIPLE, max(_FEWEST_ROWS, count)
    while _round_up(count, 2 * multiple) <= count * (1 + _ROUNDING):
        multiple *= 2
    return _round_up(count, multiple)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _cheapest_fit(lengths: Sequence[int], costs: Sequence[float], capacity: int, count: int) -> list[list[int]] | None:
    """Put items, the costliest first, each into the cheapest of `count` rows that fits; None if none fits."""
    rows: list[list[int]] = [[] for _ in range(count)]
    free, sums = np.full(count, capacity), np.zeros(count)
    for item in sorted(range(len(lengths)), key=lambda i: (-costs[i], i)):
        row = int(np.where(free >= lengths[item], sums, np.inf).argmin())
        if free[row] < lengths[item]:
            return None
        rows[row].append(item)
        free[row] -= lengths[item]
        sums[row] += costs[item]
    return rows
