"""Parameters, FLOPs and activations of a language model, from its config.json, without torch or transformers.

The counts equal those of transformers' models. `models.json` has the configurations of common models, so that a plan
needs no hub; keys that it omits are transformers' defaults. `tried_families.json` has what works with small models of
each family, as tests/integration/families has tried it.
"""

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.orchestrator.packing import RowCost

_KNOWN = Path(__file__).with_name("models.json")
_TRIED = Path(__file__).with_name("tried_families.json")
_DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "phi3", "granite", "nanochat")
_SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss")
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_OTHER_SIZES = (
    *("num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "max_position_embeddings"),
    *("shared_expert_intermediate_size", "n_shared_experts", "first_k_dense_replace", "decoder_sparse_step"),
    *("sliding_window", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
)
_MOST_LAYERS, _LARGEST = 10**4, 10**8


@dataclass(frozen=True, slots=True)
class Block:
    """Sizes of a transformer block.

    Attributes:
        attention: parameters of the attention, without norms.
        mlp: parameters of the dense or shared MLP and of the router.
        norms: parameters of all norms.
        experts: parameters of all experts.
        active: those that one token uses.
        hidden: width of the residual states.
        query: width of all heads' queries.
        key_value: width of all heads' keys, and of their values.
        output: width of all heads' outputs; that of queries except in multi-head latent attention.
        width: of the MLP that a token passes: dense, or shared.
        expert_width: sum of the widths of a token's experts.
        chosen: experts of a token.
        cache: elements of the KV cache of a token.
        window: tokens that the attention sees; 0 is all.
        has_head_norms: whether queries and keys are normalized.
    """

    attention: int
    mlp: int
    norms: int
    experts: int
    active: int
    hidden: int
    query: int
    key_value: int
    output: int
    width: int
    expert_width: int
    chosen: int
    cache: int
    window: int
    has_head_norms: bool

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.attention + self.mlp + self.norms + self.experts

    @property
    def products(self) -> int:
        """Elements per token that selective recomputation saves: the block's input, matrix products and attention.

        Experts also save their permuted inputs and their outputs (docs/design/memory.md).
        """
        attention = 3 * self.hidden + self.query + self.output + 2 * self.key_value
        return attention + 2 * self.width + 3 * self.expert_width + 2 * self.chosen * self.hidden

    def eager_bytes(self, element: int) -> int:
        """Bytes per token that the eager block saves, in elements of so many bytes; norms save their input in float32.

        Counted with torch's hooks for saved tensors on blocks of Llama, Qwen2, Qwen3 and Qwen3-MoE.
        """
        norms = 2 * self.hidden * (4 + 2 * element) + self.has_head_norms * (self.query + self.key_value) * (
            4 + element
        )
        attention = element * (3 * self.query + 2 * self.key_value)
        return norms + attention + element * (4 * (self.width + self.expert_width) + 3 * self.chosen * self.hidden)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model."""

    name: str
    blocks: tuple[Block, ...]
    hidden: int
    vocabulary: int
    tied: bool
    longest: int  # max_position_embeddings

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding; as many has the output head."""
        return self.vocabulary * self.hidden

    @cached_property
    def body(self) -> int:
        """Parameters of the blocks and of the last norm, which has weights if those of the blocks do."""
        return sum(block.parameters for block in self.blocks) + self.hidden * (self.blocks[0].norms > 0)

    @cached_property
    def experts(self) -> int:
        """Parameters of all experts."""
        return sum(block.experts for block in self.blocks)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.body + self.embedding * (1 if self.tied else 2)

    @cached_property
    def active_matrices(self) -> int:
        """Weights of the blocks that one token is multiplied with."""
        return sum(block.attention + block.mlp + block.active for block in self.blocks)

    @cached_property
    def active(self) -> int:
        """Parameters that one token uses, without the input embedding."""
        return self.active_matrices + self.embedding

    @cached_property
    def cost(self) -> RowCost:
        """FLOPs of forward and backward, as the orchestrator balances rows by."""
        pairs = Counter[bool]()
        for block in self.blocks:
            pairs[block.window > 0] += 6 * (block.query + block.output)
        return RowCost(
            body=6.0 * self.active_matrices,
            head=6.0 * self.embedding,
            attention=float(pairs[False]),
            windowed=float(pairs[True]),
            window=max(block.window for block in self.blocks),
        )

    @cached_property
    def largest_block(self) -> Block:
        """The block with most parameters."""
        return max(self.blocks, key=lambda block: block.parameters)

    def cache_elements(self, tokens: float) -> float:
        """Elements of the KV cache of a sequence of so many tokens."""
        return sum(block.cache * (min(tokens, block.window) if block.window else tokens) for block in self.blocks)


def load_shape(name: str) -> ModelShape:
    """Return the shape of a local directory with a config.json, a common model, or a model in the hub's cache.

    A name that continues that of a common model, as of its fine-tuned versions, has the shape of that model.

    Raises:
        ConfigError: the model is unknown, or its config.json is of an unsupported kind.
    """
    key, known = name.rpartition("/")[2].lower().removeprefix("meta-"), _known_models()
    source = None if key in known and not Path(name).expanduser().is_dir() else _config_file(name)
    if source is None:
        bases = [base for base in known if f"{key}-".startswith(f"{base}-") and "-distill-" not in key[len(base) :]]
        if not bases:
            near = ", ".join(get_close_matches(key, known, 3)) or "Qwen3-4B, Llama-3.1-8B, GLM-4.5-Air"
            raise ConfigError(
                f"model.name = {name}: its shape is unknown; set a local directory with its config.json, or a common "
                f"model such as {near}"
            )
        base = max(bases, key=len)
        return shape_of(name if base == key else f"{name} (as {base})", known[base])
    try:
        return shape_of(name, json.loads(source.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(f"model.name = {name}: {source} cannot be used: {summarize_exception(error)}") from None


@cache
def _known_models() -> dict[str, dict[str, Any]]:
    """Return the configurations by the names of models and of others with the same shape, in small letters."""
    models = json.loads(_KNOWN.read_text())
    return {name.lower(): config for names, config in models.items() for name in names.split()}


def describe_family(name: str, revision: str | None = None) -> str | None:
    """Return what works with the family of a model, and what does not, as docs/reference/models.md says.

    None if the model is neither a local directory nor in the hub's cache, or its config.json has no `model_type`.
    """
    source = _config_file(name, revision)
    try:
        config = json.loads(source.read_text()) if source is not None else {}
        family = (config.get("text_config") or config).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    if not isinstance(family, str):
        return None
    row: dict[str, str] | None = json.loads(_TRIED.read_text()).get(family)
    if row is None:
        return f"{family}: not in the table of tried families (docs/reference/models.md); it is tried at the start"
    works = ", ".join(cell for cell, found in row.items() if found == "yes")
    refused = [f"; {cell}: {found}" for cell, found in row.items() if found.startswith("no: ")]
    return f"{family}: tried with a small model: {works}{''.join(refused)}"


def _config_file(name: str, revision: str | None = None) -> Path | None:
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory / "config.json"
    from huggingface_hub import try_to_load_from_cache  # slow to import
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        found = try_to_load_from_cache(name, "config.json", revision=revision)
        return Path(found) if isinstance(found, str) else None
    return None


def shape_of(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a config.json describes. Raises ConfigError for an unsupported `model_type`."""
    text = config.get("text_config") or config
    kind = text.get("model_type", "")
    if kind not in (*_DENSE, *_SPARSE):
        supported = ", ".join((*_DENSE, *_SPARSE))
        raise ConfigError(f"model.name = {name}: plan does not know the layers of a {kind!r}; it knows {supported}")
    _check_sizes(name, text, kind)
    kinds = _window_kinds(text, kind)
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", kind.startswith("gemma")))
    blocks = tuple(_block(text, kind, layer, windowed) for layer, windowed in enumerate(kinds))
    longest = text.get("max_position_embeddings", 131072)
    return ModelShape(name, blocks, text["hidden_size"], text["vocab_size"], bool(tied), longest)


def _check_sizes(name: str, text: Mapping[str, Any], kind: str) -> None:
    """Raise ConfigError for a size that is no whole number, or not above 0 where it must be."""
    needed = [*_SIZES, *(("intermediate_size",) if kind in _DENSE else ("num_experts_per_tok",))]
    experts = [key for key in _EXPERTS if text.get(key) is not None]
    if kind in _SPARSE and not experts:
        raise ConfigError(f"model.name = {name}: its config.json has none of {', '.join(_EXPERTS)}")
    for key in (*needed, *_OTHER_SIZES, *experts):
        value = text.get(key)
        least, most = (1 if key in needed else 0), (_MOST_LAYERS if key == "num_hidden_layers" else _LARGEST)
        if (key in needed or value is not None) and not (type(value) is int and least <= value <= most):
            raise ConfigError(
                f"model.name = {name}: its config.json has {key} = {value!r}; a whole number from {least} to {most} is "
                "needed"
            )
    types, layers = text.get("layer_types"), text["num_hidden_layers"]
    if types and len(types) != layers:
        raise ConfigError(f"model.name = {name}: its config.json has {len(types)} layer_types for {layers} layers")
    if experts and 0 < text[experts[0]] < (text.get("num_experts_per_tok") or 0):
        raise ConfigError(f"model.name = {name}: its config.json has num_experts_per_tok above {experts[0]}")


def _window_kinds(text: Mapping[str, Any], kind: str) -> list[bool]:
    """Return for each layer whether its attention has a window."""
    layers = text["num_hidden_layers"]
    if types := text.get("layer_types"):
        if other := {*types} - {"full_attention", "sliding_attention"}:
            raise ConfigError(f"plan does not know layers of the type {min(other)!r}")
        return [one == "sliding_attention" for one in types]
    if kind == "gemma3_text":
        return [(layer + 1) % text.get("sliding_window_pattern", 6) > 0 for layer in range(layers)]
    if kind in ("gpt_oss", "gemma2"):
        return [layer % 2 == 0 for layer in range(layers)]
    switched = text.get("use_sliding_window", kind in ("mistral", "mixtral", "phi3"))
    return [bool(text.get("sliding_window") and switched)] * layers


def _block(text: Mapping[str, Any], kind: str, layer: int, windowed: bool) -> Block:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    attention, head_norms, query, key_value, output, cached = _attention(text, kind, hidden, heads)
    experts = next((text[key] for key in _EXPERTS if text.get(key)), 0)
    is_dense = kind in _DENSE or not experts or layer < text.get("first_k_dense_replace", 0)
    is_dense |= layer in (text.get("mlp_only_layers") or ()) or (layer + 1) % (text.get("decoder_sparse_step") or 1) > 0
    if is_dense:
        width = text["intermediate_size"]
        expert, chosen, experts, each = 0, 0, 0, 0
        mlp = (2 if kind == "nanochat" else 3) * hidden * width + (2 * width + hidden if text.get("mlp_bias") else 0)
    else:
        expert = text.get("moe_intermediate_size") or text["intermediate_size"]
        chosen = text["num_experts_per_tok"]
        width = text.get("shared_expert_intermediate_size") if kind == "qwen2_moe" else 0
        width = width or expert * (text.get("n_shared_experts") or 0)
        mlp = 3 * hidden * width + hidden * experts + (hidden if kind == "qwen2_moe" else 0)
        each = 3 * hidden * expert
        if kind == "gpt_oss":
            mlp, each = mlp + experts, each + 2 * expert + hidden
    return Block(
        attention=attention,
        mlp=mlp,
        norms=(4 if kind.startswith("gemma") else 0 if kind == "nanochat" else 2) * hidden + head_norms,
        experts=experts * each,
        active=chosen * each,
        hidden=hidden,
        query=query,
        key_value=key_value,
        output=output,
        width=width,
        expert_width=chosen * expert,
        chosen=chosen,
        cache=cached,
        window=int(text.get("sliding_window") or 0) if windowed else 0,
        has_head_norms=head_norms > 0,
    )


def _attention(text: Mapping[str, Any], kind: str, hidden: int, heads: int) -> tuple[int, int, int, int, int, int]:
    """Return the parameters of attention and of its norms, the widths of a `Block`, and its cached elements."""
    if kind == "deepseek_v3":
        rank, rotated = text["kv_lora_rank"], text["qk_rope_head_dim"]
        query, output = heads * (text["qk_nope_head_dim"] + rotated), heads * text["v_head_dim"]
        low = text.get("q_lora_rank")
        matrices = hidden * low + low * query if low else hidden * query
        matrices += hidden * (rank + rotated) + rank * heads * (text["qk_nope_head_dim"] + text["v_head_dim"])
        # keys and values are as wide as the mean of queries and outputs: the latent ones are expanded
        return matrices + output * hidden, rank + (low or 0), query, (query + output) // 2, output, rank + rotated
    width = text.get("head_dim") or hidden // heads
    query, key_value = heads * width, (text.get("num_key_value_heads") or heads) * width
    matrices = 2 * hidden * (query + key_value)
    has_bias = text.get("attention_bias", kind == "gpt_oss") and kind not in ("mistral", "mixtral")
    if has_bias or kind.startswith("qwen2"):
        matrices += query + 2 * key_value + (0 if kind in ("qwen2", "qwen2_moe", "glm4_moe") else hidden)
    if kind == "gpt_oss":
        matrices += heads  # sinks
    has_norms = kind in ("qwen3", "qwen3_moe", "gemma3_text") or text.get("use_qk_norm", False)
    norms = query + key_value if kind == "olmo2" else 2 * width * has_norms
    return matrices, norms, query, key_value, query, 2 * key_value
