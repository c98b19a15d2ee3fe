"""A server returns the experts that each token chose, which transformers computes from the same weights."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from prime_rl.rollouts.clients.inference_client import InferenceClient
from prime_rl.rollouts.recorder import SampleBuilder
from prime_rl.rollouts.rendering.messages import Generation
from tests.integration.inference.conftest import wait_for_metric
from tests.integration.inference.test_architectures import SMALL
from tests.support.server import Server, inference_server
from tests.support.tiny_model import publish_weights, save_random_model

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 3, "head_dim": 32}
CONFIGS: dict[str, Any] = {
    "qwen3_moe": transformers.Qwen3MoeConfig(**SMALL, **_EXPERTS, num_experts=8, decoder_sparse_step=1),
    "many_experts": transformers.Qwen3MoeConfig(**SMALL, **_EXPERTS, num_experts=320, decoder_sparse_step=1),
    "glm4_moe": transformers.Glm4MoeConfig(
        **SMALL, **_EXPERTS, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1
    ),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2),
    "olmoe": transformers.OlmoeConfig(**SMALL, num_experts=8, num_experts_per_tok=3),
}
ARGUMENTS = ["--enable-return-routed-experts", "--vllm.max_num_batched_tokens", "64", "--vllm.max_num_seqs", "16"]
ARGUMENTS += ["--vllm.enable_chunked_prefill", "true", "--vllm.block_size", "32", "--vllm.kv_cache_memory_bytes", "64M"]
LENGTH = 600
SAMPLING: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}


def chosen_experts(model_dir: Path, token_ids: list[int]) -> list[np.ndarray]:
    """Experts of each token in the layers that have experts, each [tokens, experts per token], sorted."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    chosen: list[np.ndarray] = []
    for module in model.modules():
        if any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda _, arguments: chosen.append(arguments[1].sort(1).values.numpy()))
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    return chosen


def assert_routes(generation: Generation, prompt: list[int], model_dir: Path) -> None:
    assert generation.routes is not None
    expected = chosen_experts(model_dir, [*prompt, *generation.token_ids.tolist()])
    found = np.sort(generation.routes.array, axis=-1)
    assert generation.routes.dtype == ("<u2" if "many" in model_dir.parent.name else "|u1")
    for layer, experts in enumerate(reversed(expected), 1):  # the dense layers are first
        assert np.array_equal(found[:, -layer], experts[generation.routes_start : -1])
    assert not found[:, : found.shape[1] - len(expected)].any()


@pytest.mark.parametrize("name", CONFIGS)
async def test_routes_are_those_of_transformers(name, tmp_path):
    """Prompts in chunks, in the prefix cache and beside others; by stream and by HTTP; after a switch."""
    base = save_random_model(CONFIGS[name], tmp_path / name / "base", 0)
    prompts = [[3 + (7 * i + i * j) % 90 for i in range(40 + 50 * j)] for j in range(4)]
    with inference_server(base, tmp_path / "server.log", ARGUMENTS) as server:
        async with InferenceClient(server.url, server.model, "") as client:
            for _ in range(2):
                answers = await asyncio.gather(*(client.generate(prompt, SAMPLING) for prompt in prompts))
                for prompt, generation in zip(prompts, answers, strict=True):
                    assert_routes(generation, prompt, base)
            second = [*prompts[1], *answers[1].token_ids.tolist(), 5, 6, 7]
            start = {"routed_experts_prompt_start": len(second) - 4}
            assert_routes(await client.generate(second, SAMPLING | start), second, base)
            assert_routes(await client._post_generation(second, SAMPLING), second, base)
            step = save_random_model(CONFIGS[name], tmp_path / name / "model_1", 1)
            server.update(publish_weights(tmp_path, step, 1), 1)
            assert_routes(await client.generate(second, SAMPLING), second, step)
            builder = SampleBuilder()
            first = await client.generate(prompts[2], SAMPLING)
            builder.add(np.array(prompts[2], np.int32), first)
            prompt = [*prompts[2], *first.token_ids.tolist(), 9, 8]
            known = builder.find_known_routes(np.array(prompt, np.int32))
            assert known == len(prompt) - 3
            last = await client.generate(prompt, SAMPLING | {"routed_experts_prompt_start": known})
            builder.add(np.array(prompt, np.int32), last)
            (sample,) = builder.samples()
            assert sample.routes is not None and not sample.routes.array[-1].any()
            expected = chosen_experts(step, sample.tokens.tolist())
            assert np.array_equal(np.sort(sample.routes.array[:-1, -1], axis=-1), expected[-1][:-1])


async def interrupted(server: Server, directory: Path, prompts: list[list[int]]) -> list[Generation]:
    """Switch while the prompts are sampled."""
    async with InferenceClient(server.url, server.model, "") as client:
        sent = [client.generate(prompt, {**SAMPLING, "max_tokens": LENGTH, "seed": 1}) for prompt in prompts]
        tasks = [asyncio.create_task(one) for one in sent]
        await asyncio.to_thread(wait_for_metric, server, "vllm:generation_tokens_total", 32 * 40)
        await asyncio.to_thread(server.update, directory, 1)
        return await asyncio.gather(*tasks)


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
async def test_routes_of_requests_that_a_switch_interrupts(kv_cache, tmp_path):
    """Each token has the route of the step that processed it first; cached prefixes have those of their weights."""
    config = CONFIGS["qwen3_moe"]
    base = save_random_model(config, tmp_path / "base", 0)
    step = save_random_model(config, tmp_path / "model_1", 1)
    directory = publish_weights(tmp_path, step, 1)
    # 32 seats and lengths, one prefill: a request is at the end of a block whenever the switch comes.
    prompts = [[5 + j, *(3 + (7 * i + i * j) % 90 for i in range(30 + j))] for j in range(34)]
    sizes = ["--vllm.max_num_seqs", "32", "--vllm.max_num_batched_tokens", "2048"]
    arguments = [*ARGUMENTS, *sizes, "--kv_cache_on_weight_update", kv_cache]
    with inference_server(base, tmp_path / "server.log", arguments) as server:
        answers = await interrupted(server, directory, prompts)
        async with InferenceClient(server.url, server.model, "") as client:
            whole = [[*prompt, *one.token_ids.tolist()] for prompt, one in zip(prompts, answers, strict=True)]
            again = await asyncio.gather(*(client.generate(tokens, SAMPLING | {"max_tokens": 1}) for tokens in whole))
    switched = 0
    for prompt, generation, tokens, later in zip(prompts, answers, whole, again, strict=True):
        assert generation.routes is not None and later.routes is not None
        old, new = (chosen_experts(policy, tokens)[-1] for policy in (base, step))
        assert np.array_equal(np.sort(later.routes.array, axis=-1)[:, -1], new)
        found = np.sort(generation.routes.array, axis=-1)[:, -1]
        end = len(prompt) + int((generation.versions == 0).sum()) - 1 if generation.versions[0] == 0 else 0
        assert np.array_equal(found[:end], old[:end])
        if kv_cache == "recompute" or not end:
            assert np.array_equal(found[end + bool(end) :], new[end + bool(end) : -1])
        switched += 0 < end < len(found)
    assert switched == 32
