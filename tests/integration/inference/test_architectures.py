"""A switch updates models other than Qwen3, and their log-probabilities stay those of transformers.

Mixtures of experts, whose weights are packed on a CPU (`patches`), also with shared experts and a router with a bias
(GLM-4.5), and models with softcapped logits: Gemma 2, and NanoChat, which vLLM runs through transformers' own code.
"""

from collections.abc import Callable
from typing import Any

import pytest
import transformers

from tests.integration.inference.conftest import PROMPT, gap, logprobs_of
from tests.support.server import inference_server
from tests.support.tiny_model import publish_weights, save_random_model

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "experts": lambda: transformers.Qwen3MoeConfig(
        **SMALL, head_dim=32, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **SMALL, head_dim=32, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, use_qk_norm=True
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **{**SMALL, "tie_word_embeddings": True},
        head_dim=32,
        sliding_window=16,
        final_logit_softcapping=3.0,
        attn_logit_softcapping=2.0,
    ),
    "nanochat": lambda: transformers.NanoChatConfig(**SMALL, final_logit_softcapping=3.0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_switch_updates_the_model(name, tmp_path, reference):
    base = save_random_model(CONFIGS[name](), tmp_path / "base", 0)
    with inference_server(base, tmp_path / "server.log", ["--vllm.kv_cache_memory_bytes", "64M"]) as server:
        for step in (1, 2):
            directory = publish_weights(
                tmp_path, save_random_model(CONFIGS[name](), tmp_path / f"model_{step}", step), step
            )
            server.update(directory, step)
            choice = server.generate(PROMPT, temperature=1.0, seed=step, max_tokens=64)
            assert gap(logprobs_of(choice), reference.logprobs(directory, PROMPT, choice["token_ids"])) <= 1e-4
        server.reload()
        choice = server.generate(PROMPT, temperature=1.0, seed=3, max_tokens=64)
        assert gap(logprobs_of(choice), reference.logprobs(base, PROMPT, choice["token_ids"])) <= 1e-4
