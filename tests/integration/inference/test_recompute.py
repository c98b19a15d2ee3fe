"""Switches during many completions: exact version spans (I5), and log-probabilities that agree per span (I6).

Under `kv_cache_on_weight_update = recompute` a token depends on one policy only, so each span must agree
with a forward pass of its version. tests/integration/inference/test_spans.py compares the spans with trained batches.
"""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from prime_rl.rollouts.clients.inference_client import InferenceClient, decode_generation
from prime_rl.rollouts.rendering.messages import Generation
from tests.integration.inference.conftest import (
    AGREEMENT,
    PROMPT,
    Reference,
    gap,
    logprobs_of,
    metric,
    versions_of,
    wait_for_metric,
)
from tests.support.server import Server, inference_server
from tests.support.tiny_model import publish_weights

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

REQUESTS = 200
TOKENS = 520


@pytest.fixture
def recomputing(models, tmp_path):
    log = tmp_path / "server.log"
    arguments = ["--kv_cache_on_weight_update", "recompute", "--vllm.max_num_seqs", "64"]
    arguments += ["--vllm.kv_cache_memory_bytes", "64M"]
    with inference_server(models.base, log, arguments) as server:
        yield server


@pytest.fixture
def policies(models, tmp_path):
    """Directory by version: the base, and three that are published here."""
    sources = {1: models.published[1], 2: models.published[2], 3: models.published[1]}
    published = {f"0.{step}": publish_weights(tmp_path, source, step) for step, source in sources.items()}
    return {"0.0": models.base, **published}


Completions = list[tuple[dict[str, Any], Generation]]
"""Each as a choice of vLLM's HTTP response, and as the orchestrator reads it."""
SAMPLING = {"max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}


async def _sample_by_http(server: Server, prompts: list[list[int]]) -> Completions:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=500, limits=limits) as client:
        bodies = [server.request(prompt, seed=i, **SAMPLING) for i, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*(client.post("/inference/v1/generate", json=body) for body in bodies))
    completions = []
    for answer in answers:
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        # The headers name the versions that were loaded at the request and at the response.
        first, last = (answer.headers[name] for name in ("x-policy-version", "x-policy-version-end"))
        spans = versions_of(choice)
        assert first <= spans[0][0] <= spans[-1][0] <= last
        completions.append((choice, decode_generation(answer.content, TOKENS, None)))
    return completions


async def _sample_by_stream(server: Server, prompts: list[list[int]]) -> Completions:
    async with InferenceClient(server.url, server.model, "run", timeout_seconds=500) as client:
        answers = [client.generate(prompt, {**SAMPLING, "seed": i}) for i, prompt in enumerate(prompts)]
        generations = await asyncio.gather(*answers)
        assert client._stream.is_offered, "the requests were sent by HTTP"
    return [(_choice_of(generation), generation) for generation in generations]


def _choice_of(generation: Generation) -> dict[str, Any]:
    bounds = [0, *(np.flatnonzero(np.diff(generation.versions)) + 1).tolist(), len(generation.versions)]
    return {
        "token_ids": generation.token_ids.tolist(),
        "logprobs": {"content": [{"logprob": float(value)} for value in generation.logprobs]},
        "weight_versions": [
            {"version": f"0.{generation.versions[start]}", "start": start, "end": end}
            for start, end in pairwise(bounds)
        ],
    }


async def _sample_across_switches(
    server: Server,
    policies: dict[str, Path],
    prompts: list[list[int]],
    sample: Callable[[Server, list[list[int]]], Awaitable[Completions]] = _sample_by_http,
) -> Completions:
    """Sample completions of the prompts, in turn, during three switches, and check the version spans of every response.

    The prompts are sampled again if the engine finishes them before the last switch arrives.
    """
    start = metric(server, "vllm:generation_tokens_total")

    def switch() -> None:
        for step in (1, 2, 3):
            wait_for_metric(server, "vllm:generation_tokens_total", above=start + step * len(prompts) * TOKENS / 8)
            server.update(policies[f"0.{step}"], step)

    switching = asyncio.create_task(asyncio.to_thread(switch))
    completions: Completions = []
    while "0.3" not in {versions_of(choice)[-1][0] for choice, _ in completions}:
        were_switched = switching.done() and switching.result() is None
        completions += await sample(server, prompts)
        assert not were_switched or versions_of(completions[-1][0])[0][0] == "0.3"
    await switching
    for choice, _ in completions:
        spans = versions_of(choice)
        assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
        assert spans[-1][2] == TOKENS
    return completions


def _agree(choice: dict[str, Any], prompt: list[int], policies: dict[str, Path], reference: Reference) -> float:
    """The largest difference of a span to its own version's forward pass."""
    expected = {
        version: reference.logprobs(policies[version], prompt, choice["token_ids"])
        for version, _, _ in versions_of(choice)
    }
    measured = logprobs_of(choice)
    return max(gap(measured[start:end], expected[version][start:end]) for version, start, end in versions_of(choice))


@pytest.mark.parametrize("sample", [_sample_by_http, _sample_by_stream])
async def test_recomputed_spans_agree_with_their_version(recomputing, policies, reference, sample):
    prompts = [[*PROMPT, 6 + i % 90, 6 + i // 90] for i in range(REQUESTS)]
    preempted = metric(recomputing, "vllm:num_preemptions_total")
    sampled_choices = await _sample_across_switches(recomputing, policies, prompts, sample)
    assert metric(recomputing, "vllm:num_preemptions_total") >= preempted + 3 * 32
    straddling = [choice for choice, _ in sampled_choices if len(versions_of(choice)) > 1]
    assert len(straddling) >= 64
    for (choice, _), prompt in zip(sampled_choices, cycle(prompts)):
        assert _agree(choice, prompt, policies, reference) <= AGREEMENT
