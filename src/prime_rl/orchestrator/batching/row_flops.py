"""Reads a model's config.json and estimates the FLOPs of a sample in the trainer, without torch or transformers."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_rl.core.errors import summarize_exception

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


def read_model_config(model: str) -> Mapping[str, Any]:
    """Return the configuration of the language model in `model`, a local directory or a Hugging Face id.

    The configuration only improves estimates: if it cannot be read, the result is empty, with a warning.
    """
    try:
        config = json.loads(_path(model).read_text())
        if not isinstance(config, dict):
            raise ValueError("config.json is not a JSON object")
    except (OSError, ValueError) as error:
        logger.warning("config.json of {} cannot be read: {}", model, summarize_exception(error))
        return {}
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Return the size of the vocabulary; None if config.json does not contain it."""
    size = config.get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def _path(model: str) -> Path:
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory / "config.json"
    from huggingface_hub import hf_hub_download  # rarely needed, and slow to import

    with suppress(FileNotFoundError):  # not in the cache
        return Path(hf_hub_download(model, "config.json", local_files_only=True))
    return Path(hf_hub_download(model, "config.json"))
