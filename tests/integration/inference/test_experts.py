"""A switch updates a mixture of experts, whose weights are packed on a CPU (`patches`)."""

from pathlib import Path

import pytest

from tests.integration.inference.conftest import Reference, gap, logprobs_of
from tests.support.server import inference_server
from tests.support.tiny_model import make_tokenizer, publish_weights

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [1, 4, 6, *range(70, 100), 2, 6, 1, 5, 6]


def _make_model(path: Path, seed: int) -> Path:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=2048, tie_word_embeddings=False, initializer_range=0.2, decoder_sparse_step=1,
        bos_token_id=None, eos_token_id=2, pad_token_id=0, dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3MoeForCausalLM(config).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def test_switch_updates_experts(tmp_path: Path, reference: Reference) -> None:
    base = _make_model(tmp_path / "base", 0)
    with inference_server(base, tmp_path / "server.log", ["--vllm.kv_cache_memory_bytes", "64M"]) as server:
        for step in (1, 2):
            directory = publish_weights(tmp_path, _make_model(tmp_path / f"model_{step}", step), step)
            server.update(directory, step)
            choice = server.generate(PROMPT, temperature=1.0, seed=step, max_tokens=64)
            assert gap(logprobs_of(choice), reference.logprobs(directory, PROMPT, choice["token_ids"])) <= 1e-4
        server.reload()
        choice = server.generate(PROMPT, temperature=1.0, seed=3, max_tokens=64)
        assert gap(logprobs_of(choice), reference.logprobs(base, PROMPT, choice["token_ids"])) <= 1e-4
