"""Writes a small random model that reads and writes any text, one token per byte of UTF-8. Needs no torch."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VOCABULARY = 264  # 256 bytes and the special tokens, rounded up to a multiple that suits matrix kernels
TOKEN_FIELDS = {"vocab_size": _VOCABULARY, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
"""Fields of a model's configuration that belong to the tokenizer."""
_HIDDEN, _MLP, _LAYERS, _HEADS, _KEY_VALUE_HEADS, _HEAD = 128, 384, 2, 4, 2, 32
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": _HIDDEN,
    "intermediate_size": _MLP,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KEY_VALUE_HEADS,
    "head_dim": _HEAD,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "dtype": "float32",
    **TOKEN_FIELDS,
}
_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "additional_special_tokens": ["<|im_start|>"],
    "clean_up_tokenization_spaces": False,
}


def write_byte_model(directory: Path, chat_template: str) -> None:
    """Write weights, configuration and tokenizer in Hugging Face layout to an existing directory."""
    from safetensors.numpy import save_file

    save_file(dict(_weights()), directory / "model.safetensors", metadata={"format": "pt"})
    generation = {key: _CONFIG[key] for key in ("eos_token_id", "pad_token_id")}
    for name, values in (("config", _CONFIG), ("generation_config", generation)):
        (directory / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    write_byte_tokenizer(directory, chat_template)


def write_byte_tokenizer(directory: Path, chat_template: str) -> None:
    """Write the tokenizer to an existing directory."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    symbols = (*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def _weights() -> Iterator[tuple[str, NDArray[np.float32]]]:
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return random.normal(0, 0.02, (rows, columns)).astype(np.float32)

    def ones(size: int) -> NDArray[np.float32]:
        return np.ones(size, np.float32)

    yield "model.embed_tokens.weight", matrix(_VOCABULARY, _HIDDEN)
    yield "model.norm.weight", ones(_HIDDEN)
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{norm}.weight", ones(_HIDDEN)
        for norm in ("q_norm", "k_norm"):
            yield f"{prefix}self_attn.{norm}.weight", ones(_HEAD)
        for name, heads in (("q", _HEADS), ("k", _KEY_VALUE_HEADS), ("v", _KEY_VALUE_HEADS)):
            yield f"{prefix}self_attn.{name}_proj.weight", matrix(heads * _HEAD, _HIDDEN)
        yield f"{prefix}self_attn.o_proj.weight", matrix(_HIDDEN, _HEADS * _HEAD)
        for name in ("gate", "up"):
            yield f"{prefix}mlp.{name}_proj.weight", matrix(_MLP, _HIDDEN)
        yield f"{prefix}mlp.down_proj.weight", matrix(_HIDDEN, _MLP)
