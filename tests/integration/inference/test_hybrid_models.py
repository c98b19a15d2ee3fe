"""Hybrid models: log-probabilities of transformers, before and after a switch, with cached recurrent states."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.integration.inference.conftest import gap, logprobs_of, metric
from tests.support.server import inference_server
from tests.support.tiny_model import publish_weights, save_random_model

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [1, 4, 6, *range(20, 100), *range(10, 90), *range(30, 100), 2, 6, 1, 5, 6]
"""Longer than a cached block (128 tokens) and than a chunk of the scan."""
LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": True, "initializer_range": 0.1,
    "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **{**SMALL, "tie_word_embeddings": False},
        head_dim=32, num_hidden_layers=4, layer_types=LAYERS, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=32, linear_value_head_dim=32,
    ),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **SMALL, **MAMBA, num_hidden_layers=4, layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32,
    ),
    "falcon_h1": lambda: transformers.FalconH1Config(
        **SMALL, **MAMBA, head_dim=32, num_hidden_layers=2, mamba_d_ssm=128
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **SMALL, head_dim=32, layers_block_type=["mamba", "attention", "mamba", "mlp"], mamba_num_heads=4,
        mamba_head_dim=32, ssm_state_size=16, n_groups=2, chunk_size=16,
        time_step_min=1e-6,  # transformers' smallest step; vLLM has none
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **SMALL, num_hidden_layers=4, layer_types=["conv", "conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False, conv_dim=64, block_dim=64,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("qwen3_next", "falcon_h1") else pytest.param(name, marks=pytest.mark.release)
        for name in CONFIGS
    ],
)
def test_hybrid_model_after_switches_equals_transformers_and_a_fresh_server(name, tmp_path, reference):
    arguments = ["--vllm.kv_cache_memory_bytes", "64M"]
    base = save_random_model(CONFIGS[name](), tmp_path / "base", 0)
    directory = publish_weights(tmp_path, save_random_model(CONFIGS[name](), tmp_path / "model", 1), 1)
    prompts = [PROMPT, PROMPT[:140] + PROMPT[9:], PROMPT]
    outputs = []

    def sample(weights: Path) -> None:
        outputs.append([])
        for prompt in prompts:
            choice = server.generate(prompt, max_tokens=48)
            assert gap(logprobs_of(choice), reference.logprobs(weights, prompt, choice["token_ids"])) <= 1e-4
            outputs[-1].append(choice["token_ids"])

    with inference_server(base, tmp_path / "server.log", arguments) as server:
        sample(base)
        assert metric(server, "vllm:prefix_cache_hits_total") > 0, "no cached state was read"
        server.update(directory, 1)
        sample(directory)
        server.reload()
        sample(base)
        assert outputs[2] == outputs[0]
    with inference_server(directory, tmp_path / "fresh.log", arguments) as server:
        sample(directory)
    assert outputs[3] == outputs[1]
