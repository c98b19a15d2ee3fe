"""Rotary frequencies that depend on the configured length, never on a row's (I6, I8).

transformers selects the frequencies of `longrope` and `dynamic` by the longest position in each forward pass. In a
packed row that depends on the other samples, and an inference engine cannot do so, because the keys in its cache are
already rotated. vLLM therefore selects them once at start, and the trainer does the same:

- longrope: the long factors for all positions if `max_model_len` exceeds `original_max_position_embeddings`, else the
  short ones. vLLM's default `max_model_len` is `original_max_position_embeddings`.
- dynamic: the frequencies for `max_position_embeddings`; longer sequences are refused.

The other kinds (yarn, llama3, linear) have fixed frequencies.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from prime_rl.core.errors import ConfigError

_FIXED_LONGROPE = "prime_rl_longrope"
"""Name of longrope without transformers' update in each forward pass, which also reads from the device."""


def fix_frequencies(name: str, causal_lm: PreTrainedModel, max_model_len: int | None, seq_len: int) -> None:
    """Set the frequencies of the rotary embeddings to those of vLLM, in place, before the buffers are computed.

    The model's configuration, which is published with the weights, does not change. `max_model_len` is the sequence
    length limit of the inference engine; None is its default, and `seq_len`, the longest row, limits the samples.
    Raises ConfigError if frequencies are dynamic and sequences may exceed their positions, or the frequencies are
    longrope's and the engine's default is unknown.
    """
    text, length = causal_lm.config.get_text_config(), max_model_len or seq_len
    limit = max_dynamic_length(text)
    if limit is not None and length > limit:
        raise ConfigError(
            f"model.max_model_len: {name} has dynamic rotary frequencies, which depend on the length of samples above "
            f"{limit} tokens, but sequences may have {length} tokens; set model.max_model_len (seq_len, if it is "
            f"not set) to at most {limit}"
        )
    kinds = {parameters.get("rope_type") for parameters in rope_parameters(text)}
    if "longrope" in kinds and max_model_len is None:
        default: int | None = getattr(causal_lm.config, "original_max_position_embeddings", None)
        if default is None:
            raise ConfigError(
                f"model.max_model_len: {name} has longrope frequencies and no original_max_position_embeddings in its "
                "config.json, so they depend on the server's max_model_len; set both to the same value"
            )
        length = default
    ROPE_INIT_FUNCTIONS[_FIXED_LONGROPE] = ROPE_INIT_FUNCTIONS["longrope"]
    for module in causal_lm.modules():
        kind = getattr(module, "rope_type", None)
        if kind == "longrope":
            module.rope_type = _FIXED_LONGROPE
            module.config = deepcopy(module.config)
            _choose_factors(module.config.rope_parameters, length)
        elif isinstance(kind, dict) and "longrope" in kind.values():  # one set of frequencies for each kind of layer
            module.config = deepcopy(module.config)
            for layer in [layer for layer, one in kind.items() if one == "longrope"]:
                kind[layer] = _FIXED_LONGROPE
                _choose_factors(module.config.rope_parameters[layer], length)


def max_dynamic_length(text: Any) -> int | None:
    """Return the longest sequence of a model with dynamic frequencies (configuration `text`), else None."""
    kinds = {parameters.get("rope_type") for parameters in rope_parameters(text)}
    return int(text.max_position_embeddings) if "dynamic" in kinds else None


def rope_parameters(text: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of the rotary embeddings: none, one set, or one for each kind of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (value for value in parameters.values() if isinstance(value, dict))


def _choose_factors(parameters: dict[str, Any], length: int) -> None:
    """Replace both sets of factors by the one that `length` selects."""
    is_long = length > parameters["original_max_position_embeddings"]
    used, other = ("long", "short") if is_long else ("short", "long")
    for value in ("factor", "mscale"):
        if f"{used}_{value}" in parameters:
            parameters[f"{other}_{value}"] = parameters[f"{used}_{value}"]
