"""The pause of a switch, compared with the time to copy and process the same tensors."""

from pathlib import Path

import pytest

from tests.integration.inference.conftest import PROMPT, gap, generate_all, logprobs_of, metric, wait_for_metric
from tests.support.server import inference_server
from tests.support.tiny_model import make_tokenizer, publish_weights

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]


def _make_model(path: Path, seed: int) -> Path:
    """A random Qwen3 of 26 million parameters (105 MB), written in three shards."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=2, pad_token_id=0, dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(path, max_shard_size="40MB")
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The base model, and versions 1 and 2."""
    root = tmp_path_factory.mktemp("larger")
    return [
        _make_model(root / "base", 0),
        *(publish_weights(root / "run", _make_model(root / f"model_{step}", step), step) for step in (1, 2)),
    ]


@pytest.fixture(scope="module")
def larger(published, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "server.log"
    arguments = ["--vllm.max_num_seqs", "8", "--vllm.kv_cache_memory_bytes", "64M", "--max-model-len", "1024"]
    with inference_server(published[0], log, arguments) as server:
        yield server


async def test_pause_is_shorter_than_copying_and_processing(larger, published, reference):
    """On a CPU weights are processed before the pause and pointers exchanged."""
    switches = []

    def switch() -> None:
        start = metric(larger, "vllm:generation_tokens_total")
        for step in (1, 2):
            wait_for_metric(larger, "vllm:generation_tokens_total", above=start + 40 * step)
            switches.append(larger.update(published[step], step))

    requests = [larger.request([*PROMPT, 6 + i], max_tokens=400) for i in range(4)]
    await generate_all(larger, requests, switch)
    limit = larger.post("/measure_switch").raise_for_status().json()
    assert limit["bytes"] == switches[0]["bytes"] > 100e6
    for step in (1, 2):
        larger.reload()
        switches.append(larger.update(published[step], step))
    pause = min(answer["pause_s"] for answer in switches)  # others may hold the processor during any of them
    assert pause <= 0.25 * (limit["copy_s"] + limit["process_s"])
    choice = larger.generate(PROMPT, temperature=1.0, seed=1, max_tokens=64)
    assert gap(logprobs_of(choice), reference.logprobs(published[2], PROMPT, choice["token_ids"])) <= 1e-4


async def test_sampling_continues_while_a_version_is_staged(larger, published):
    larger.reload()
    sampled = []

    def stage() -> None:
        wait_for_metric(larger, "vllm:num_requests_running", above=3)
        start = metric(larger, "vllm:generation_tokens_total")
        staged = larger.post("/stage_weights", weight_dir=str(published[1]), step=1).raise_for_status().json()
        sampled.append(metric(larger, "vllm:generation_tokens_total") - start)
        assert (staged["step"], larger.policy()["step"]) == (1, 0)
        answer = larger.update(published[1], 1)
        assert answer["stage_s"] == staged["stage_s"], "it was not read again"

    await generate_all(larger, [larger.request([*PROMPT, 6 + i], max_tokens=600) for i in range(4)], stage)
    assert sampled[0] > 0
