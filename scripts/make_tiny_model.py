"""Write a small random model of a family of transformers, to try the family with prime-rl on a CPU:

    uv run --extra cpu python scripts/make_tiny_model.py qwen3_moe tiny-moe
    uv run --extra cpu rl @ configs/reverse_text/cpu.toml --model.name tiny-moe --max-steps 2

FAMILY is the `model_type` of its config.json, such as llama, gemma3_text, deepseek_v3 or qwen3_next; of a model with
images, the part for text is written. The sizes of the family's default configuration are reduced by the rules below;
one layer of each kind remains. Its tokenizer has one token per byte of UTF-8, and its chat template renders tools.
Weights are float32 and seeded; replies are random bytes.
"""

import argparse
import difflib
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, logging
from transformers.initialization import meta_device_safe_creation_ops
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from prime_rl.core.entry_point import ArgumentParser, command
from prime_rl.core.errors import ConfigError, summarize_exception, translate_error
from prime_rl.entrypoints.init.byte_model import TOKEN_FIELDS, write_byte_tokenizer

CHAT_TEMPLATE = Path(__file__).parents[1] / "configs/chat_templates/tools.jinja"
WEIGHT_STD = 0.05  # larger weights make models with tied embeddings repeat a token, smaller ones ignore the context
MAX_PARAMETERS = 5_000_000
# Upper limits of integer fields; the first pattern that matches a name counts. A head of 32 is the smallest of vLLM's
# attention on a CPU, and 4 * 32 is the width; a state space layer has twice the width.
LIMITS = {
    r"qk_head_dim|index_head_dim": None,  # transformers adds up the first; the second exceeds qk_rope_head_dim
    r"kv_lora_rank": 512,  # this and the next are the sizes of vLLM's latent attention on a CPU
    r"qk_rope_head_dim": 64,
    r"(.*_)?vocab_size(_.*)?|ngram_vocab_size_base": 264,
    r".*head_?dim|.*_d_head|kv_channels|.*attention_head_size|rotary_dim|query_pre_attn_scalar|sliding_window": 32,
    r".*_rank": 32,
    r".*state(_size)?": 16,
    r"mamba_d_ssm|attention_hidden_size|block_multiple_of|lru_width": 256,
    r"(moe|expert|shared).*(intermediate|ffn|hidden).*size|hidden_size_per_layer_input|router_hidden_size": 64,
    r"(dense_)?intermediate_size.*|.*ffn_dim|.*(ffn|feed_forward)_(hidden_)?size|n_inner|dff|dim_ff": 256,
    r"hidden_size|d_model|n_embd|emb_dim|embedding_(size|dim)|word_embed_proj_dim|dim_model_base": 128,
    r"num_kv_shared_layers": 0,
    r"first_k_dense_replace|num_dense_layers|n_shared_experts|topk_group|attn_layer_offset|num_nextn_predict_layers": 1,
    r"mamba.*heads|n_mamba_heads": 8,
    r".*(key|key_value|kv)_heads|num_query_groups|n_groups?|mamba_n_?groups|o_groups": 2,
    r".*heads?": 4,
    r"(moe_)?(num|n)(_local|_routed)?_experts|zero_expert_num": 8,
    r"num_experts_per_tok(en)?|moe_top_?k|top_k_experts|moe_k|.*_layer_(period|interval|step)": 2,
    r"(num_|n_|attention_|decoder_)(hidden_)?(layers?|blocks)|num_layers_per_stack": 2,
}
# Fields that some default configurations leave open, though the model needs them.
OPEN = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_shared_experts")
# Like `head_dim` of glm4_moe and `conv_dim` of lfm2: fields of the real checkpoints that vLLM reads, and transformers
# does not need.
_DEEPSEEK = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# What the rules do not reach: kinds of layers that default configurations lack, and fields that must be numbers.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cwm": {"bos_token_id": 0},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "deepseek_v4": {"qk_rope_head_dim": 32},
    "falcon_h1": {"mamba_d_head": 32},
    "gemma4_text": {"global_head_dim": 64},
    "gemma4_unified_text": {"global_head_dim": 64},
    "glm4_moe": {"head_dim": 32},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "conv_dim": 128, "block_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "conv_dim": 128},
    "mamba2": {"num_heads": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention"]
    },  # its experts need a GPU in vLLM
}


@command
def main() -> None:
    """Write the model."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", metavar="FAMILY", help="model_type of transformers")
    parser.add_argument("directory", metavar="DIR", type=Path, help="directory to write; it must be new or empty")
    arguments = parser.parse_args()
    family, directory = arguments.family, arguments.directory
    if directory.exists() and not (directory.is_dir() and next(directory.iterdir(), None) is None):
        raise ConfigError(f"{directory} exists and is not an empty directory; name a new one")
    check_family(family)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Classes of transformers refuse sizes in many ways.
    errors = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError)
    with translate_error((*errors, ImportError, StrictDataclassError), partial(_explain, family)):
        model = make_model(family)
        check_outputs(model)
    with translate_error(OSError, lambda error: ConfigError(f"{directory} cannot be written: {error.strerror}")):
        directory.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(directory)
        write_byte_tokenizer(directory, CHAT_TEMPLATE.read_text(encoding="utf-8"))
    print(f"wrote {directory}: {type(model).__name__}, {model.num_parameters():,} parameters")


def check_family(family: str) -> None:
    """Raise ConfigError if transformers has no causal language model of this family."""
    if family not in CAUSAL:
        reason = "has no causal language model" if family in CONFIG_MAPPING_NAMES else "is not a model_type"
        near = difflib.get_close_matches(family, CAUSAL, 3) or ["llama", "qwen3", "qwen3_moe"]
        raise ConfigError(f"FAMILY: {family!r} {reason} of transformers; similar: {', '.join(near)}")


def make_model(family: str) -> PreTrainedModel:
    """Make the model, with reduced sizes, one layer of each kind and seeded weights."""
    default = AutoConfig.for_model(family).get_text_config(decoder=True)
    if default.is_encoder_decoder:
        raise ConfigError(f"FAMILY: {family!r} has an encoder; choose a family of decoders, such as qwen3")
    sizes, exceptions = reduce_sizes(default.to_dict()), EXCEPTIONS.get(default.model_type, {})
    config = type(default)(**{**sizes, **TOKEN_FIELDS, "dtype": "float32", **exceptions})
    with torch.device("meta"), meta_device_safe_creation_ops():  # a large one would fill the memory
        count = AutoModelForCausalLM.from_config(config).num_parameters()
    if count > MAX_PARAMETERS:
        raise ValueError(f"{count:,} parameters remain")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for values in model.state_dict().values():
        if values.is_floating_point() and not values.any():  # a bias: a lost one would not show while it is zero
            values.normal_(std=WEIGHT_STD)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    return model


def reduce_sizes(default: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a default configuration that change, with their new values."""
    sizes = _choose_layers(default)
    for name, value in (default | sizes).items():
        limit = next((limit for pattern, limit in LIMITS.items() if re.fullmatch(pattern, name)), None)
        if limit is None:
            continue
        if value is None and name in OPEN:
            sizes[name] = limit
        elif type(value) is int and name not in sizes:
            sizes[name] = min(value, limit)
        elif isinstance(value, list) and all(type(one) is int for one in value):
            sizes[name] = [min(one, limit) for one in value]
    if "kv_lora_rank" in sizes:  # latent attention: as many keys as queries; `head_dim` is that of positions
        latent = {"num_key_value_heads": sizes["num_attention_heads"], "head_dim": sizes["qk_rope_head_dim"]}
        sizes |= {name: value for name, value in latent.items() if name in sizes}
    return sizes | {name: WEIGHT_STD for name in ("initializer_range", "init_std") if name in default}


def _choose_layers(default: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with one value per layer for the first layer of each kind; at least two layers."""
    depth = default.get("num_hidden_layers") or len(default.get("layers_block_type") or ())
    indices = list(range(depth))
    lists = {k: v for k, v in default.items() if isinstance(v, list) and len(v) == depth and v != indices}
    layers = list(zip(*lists.values(), strict=True))
    if not layers:
        return {}
    chosen = [i for i in indices if layers[i] not in layers[:i]]
    chosen = chosen if len(chosen) > 1 else [0, 1]
    return {k: [v[i] for i in chosen] for k, v in lists.items()} | {"num_hidden_layers": len(chosen)}


@torch.no_grad()
def check_outputs(model: PreTrainedModel) -> None:
    """Raise ValueError if the logits are not finite or equal, ConfigError if they depend on later tokens."""
    tokens = torch.arange(3, 43)[None]
    logits = model(input_ids=tokens).logits[0]
    if not logits.isfinite().all() or logits.std(0).mean() < 1e-3 or logits.std(1).mean() < 1e-2:
        raise ValueError("its logits are not finite, or are equal")
    tokens[0, -1] = 50
    if not torch.allclose(model(input_ids=tokens).logits[0, :-1], logits[:-1], atol=1e-4):
        raise ConfigError(f"FAMILY: tokens of {type(model).__name__} attend to later ones; choose a family of decoders")


def _explain(family: str, error: BaseException) -> ConfigError:
    said = summarize_exception(error)
    return ConfigError(f"FAMILY: the rules of scripts/make_tiny_model.py do not fit {family!r}; extend LIMITS: {said}")


if __name__ == "__main__":
    main()
