"""What a sample costs the trainer, estimated in FLOPs from the model's config.json. Neither torch nor transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from loguru import logger
from numpy.typing import NDArray

_BACKWARD_AND_FORWARD = 3
"""The backward pass is two matrix products for each one of the forward pass."""


@dataclass(frozen=True, slots=True)
class RowCost:
    """FLOPs of forward and backward over a sample: linear in its tokens, quadratic where attention is.

    Attributes:
        body: per token, in the matrices of the blocks (of the experts only those that one token meets).
        head: per trained token, in the output embedding.
        attention: per pair of a token and one before it, over the layers that see the whole sample.
        windowed: the same, over the layers that see the last `window` tokens.
        window: tokens.
    """

    body: float
    head: float = 0.0
    attention: float = 0.0
    windowed: float = 0.0
    window: int = 0

    def __call__(self, lengths: NDArray[np.integer], trained: NDArray[np.integer]) -> NDArray[np.float64]:
        """Estimate each sample's cost; the cost of a row is the sum of its samples'.

        Args:
            lengths: [S], tokens of each sample.
            trained: [S], how many of them are trained on.

        Returns:
            float64 [S].
        """
        tokens = lengths.astype(np.float64)
        seen = np.minimum(tokens, self.window)
        pairs, near = tokens**2 / 2, seen * tokens - seen**2 / 2
        return self.body * tokens + self.head * trained + self.attention * pairs + self.windowed * near

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> Self:
        """Count what a model's config.json describes, of the language model where there are several.

        Raises:
            AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError: it does not describe a transformer, or
                not in the usual keys.
        """
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
"""Counts tokens: what is left when the model is not known."""


def row_cost(config: Mapping[str, Any]) -> RowCost:
    """Count what a config.json describes (`read_model_config`).

    Balance is no matter of correctness: of what describes no transformer tokens are counted, and the log says so.
    """
    try:
        return RowCost.of(config)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        logger.warning("rows are balanced by tokens: {} in the model's config.json", f"{type(error).__name__}: {error}")
        return TOKENS


def _feed_forward(text: Mapping[str, Any], layer: int) -> int:
    """Weights of the feed-forward part of one block that a token meets: gate, up and down; experts and their router."""
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
    """Name the attention of each layer as transformers does; linear attention counts as no pairs."""
    if text.get("layer_types"):
        return list(text["layer_types"])
    windowed = text.get("sliding_window") and text.get("use_sliding_window", True)
    return ["sliding_attention" if windowed else "full_attention"] * int(text["num_hidden_layers"])
