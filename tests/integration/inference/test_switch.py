"""Switching the policy of a running server: exact version tags (I5), agreement of log-probabilities (I6)."""

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.integration.inference.conftest import (
    AGREEMENT,
    DIFFERENT,
    PROMPT,
    SAMPLED,
    SEATS,
    all_seats_taken,
    gap,
    generate_all,
    generate_until_reload,
    logprobs_of,
    metric,
    versions_of,
    wait_for_metric,
)
from tests.support.server import REQUEST_TIMEOUT_SECONDS
from tests.support.tiny_model import publish_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_switch_updates_a_tied_head(server, models, reference):
    for step, directory in models.published.items():
        server.update(directory, step)
        choice = server.generate(PROMPT, temperature=1.0, seed=step, max_tokens=64)
        measured = logprobs_of(choice)
        assert gap(measured, reference.logprobs(directory, PROMPT, choice["token_ids"])) <= AGREEMENT
        assert gap(measured, reference.logprobs(models.base, PROMPT, choice["token_ids"])) > DIFFERENT


def test_reload_returns_to_the_base_model(server, models):
    before = server.generate(PROMPT)
    loaded = server.policy()
    server.update(models.published[1], 1)
    assert server.generate(PROMPT)["token_ids"] != before["token_ids"]
    answer = server.reload()
    after = server.generate(PROMPT)
    assert (answer["branch"], answer["step"], answer["hash"]) == (0, 0, loaded["hash"])
    assert after["token_ids"] == before["token_ids"]
    assert gap(logprobs_of(after), logprobs_of(before)) <= AGREEMENT
    assert versions_of(after) == [("0.0", 0, 8)]


def test_trainer_and_sampler_truncate_the_distribution_equally(server, models):
    """Top-k, top-p and min-p, alone and combined, and temperatures, in one packed row (I6)."""
    import numpy as np
    import torch

    from prime_rl.configs.training.model import TrainerModelConfig
    from prime_rl.trainer.micro_batch import make_micro_batch
    from prime_rl.trainer.weights.policy_loading import load_policy

    cuts = {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 9, "top_p": 0.8, "min_p": 0.02}, {}
    asked = list(zip(cuts, (1.3, 1.0, 0.7, 1.3, 0.7), strict=True))
    choices = [
        server.generate(PROMPT, temperature=temperature, seed=i, max_tokens=64, **cut)
        for i, (cut, temperature) in enumerate(asked)
    ]
    length = len(PROMPT) + 64
    streams = {
        "top_k": np.repeat(np.array([cut.get("top_k", 0) for cut, _ in asked], np.int32), length),
        "top_p": np.repeat(np.array([cut.get("top_p", 1) for cut, _ in asked], np.float32), length),
        "min_p": np.repeat(np.array([cut.get("min_p", 0) for cut, _ in asked], np.float32), length),
    }
    tokens = np.concatenate([[*PROMPT, *choice["token_ids"]] for choice in choices])
    mask = np.tile(np.arange(length) >= len(PROMPT), len(asked))
    temperature = np.repeat(np.array([t for _, t in asked], np.float32), length)
    row = make_micro_batch(tokens, mask, [length] * len(asked), temperature=temperature, streams=streams)
    policy = load_policy(TrainerModelConfig(name=str(models.base)), seed=0)
    with torch.no_grad():
        logprobs, _, left_out = policy(row)
    measured = [value for choice in choices for value in logprobs_of(choice)]
    assert gap(logprobs[row.scored].tolist(), measured) <= AGREEMENT
    assert not left_out.any()
    with torch.no_grad():
        whole, _ = policy(make_micro_batch(tokens, mask, [length] * len(asked), temperature=temperature))
    assert (whole - logprobs).abs().reshape(len(asked), length).amax(-1)[:4].min() > 1e-3, (
        "the truncation changed the log-probabilities"
    )


async def test_version_spans_of_running_requests_match_the_switch(server, models, reference):
    """And no other request reads the KV that they cache after a switch, which depends on several policies."""

    def switch_twice(start: float) -> None:
        for step in (1, 2):
            wait_for_metric(server, SAMPLED, above=start + step * 600)
            server.update(models.published[step], step)

    prompts = [[*PROMPT, 10 + i] for i in range(8)]
    requests = [server.request(p, temperature=1.0, seed=i) for i, p in enumerate(prompts)]
    choices = await generate_until_reload(server, requests, switch_twice)
    for prompt, choice in zip(prompts, choices, strict=True):
        spans = versions_of(choice)
        assert [version for version, _, _ in spans] == ["0.0", "0.1", "0.2"]
        assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
        assert spans[-1][2] == len(choice["token_ids"]) > 100
        # Tokens before the switch are the base model's; the tokens after it are not.
        switch = spans[0][2]
        expected = reference.logprobs(models.base, prompt, choice["token_ids"])
        assert gap(logprobs_of(choice)[:switch], expected[:switch]) <= AGREEMENT
        assert gap(logprobs_of(choice)[switch : switch + 50], expected[switch : switch + 50]) > DIFFERENT
    prompt = prompts[0] + choices[0]["token_ids"]
    later = server.generate(prompt)
    assert gap(logprobs_of(later), reference.logprobs(models.base, prompt, later["token_ids"])) <= AGREEMENT


@pytest.mark.extended
async def test_switch_during_prefill_prefills_the_prompt_again(server, models, reference):
    """One policy prefills a prompt, even if a switch occurs between its four prefill steps."""

    rng = random.Random(0)
    restarts = metric(server, "vllm:num_preemptions_total")
    sampled: list[tuple[list[int], dict[str, Any]]] = []
    is_over = False

    async def keep_sampling(client: httpx.AsyncClient) -> None:
        while not is_over:
            prompt = [rng.randrange(6, 100) for _ in range(900)]
            answer = await client.post("/inference/v1/generate", json=server.request(prompt, max_tokens=2))
            sampled.append((prompt, answer.raise_for_status().json()["choices"][0]))

    def switch_often() -> None:
        for step in (1, 2):
            wait_for_metric(server, "vllm:request_success_total", metric(server, "vllm:request_success_total") + 5)
            server.update(models.published[step], step)
        wait_for_metric(server, "vllm:request_success_total", metric(server, "vllm:request_success_total") + 5)

    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=REQUEST_TIMEOUT_SECONDS, limits=limits) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(40):  # so many that the engine always has a prompt
            tasks.create_task(keep_sampling(client))
        await asyncio.to_thread(switch_often)
        is_over = True
    assert metric(server, "vllm:num_preemptions_total") > restarts
    policies = {"0.0": models.base, "0.1": models.published[1], "0.2": models.published[2]}
    assert {versions_of(choice)[0][0] for _, choice in sampled} == set(policies)
    for prompt, choice in sampled:
        policy = policies[versions_of(choice)[0][0]]
        assert gap(logprobs_of(choice)[:1], reference.logprobs(policy, prompt, choice["token_ids"][:1])) <= AGREEMENT


@pytest.mark.parametrize("salt", [None, "tenant-7"])
def test_cache_entries_are_not_used_after_a_switch(server, models, reference, salt):
    """A client's salt is combined with the hash of the weights, on every route."""
    prompt = [*PROMPT, *range(6, 100)] * 2
    generate = {**server.request(prompt), **({"cache_salt": salt} if salt else {})}
    complete = {"model": server.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 0}
    complete |= {"return_token_ids": True, "ignore_eos": True, **({"cache_salt": salt} if salt else {})}

    def hits() -> float:
        return metric(server, "vllm:prefix_cache_hits_total")

    def ask() -> list[tuple[list[int], list[float]]]:
        native = server.post("/inference/v1/generate", **generate).raise_for_status().json()["choices"][0]
        openai = server.post("/v1/completions", **complete).raise_for_status().json()["choices"][0]
        return [(native["token_ids"], logprobs_of(native)), (openai["token_ids"], openai["logprobs"]["token_logprobs"])]

    start = hits()
    ask()
    assert hits() > start, "within one policy the second route reads the blocks of the first"
    server.update(models.published[1], 1)
    for token_ids, measured in ask():
        assert gap(measured, reference.logprobs(models.published[1], prompt, token_ids)) <= AGREEMENT


async def test_waiting_requests_with_a_shared_prefix_use_the_new_weights(server, models, reference, tmp_path):
    """32 requests, 16 concurrent, one prefix: those that wait across the switch read no KV of the old weights.

    Their prefix is in the cache, computed by the old weights, and their salt is that of the old weights. The canary has
    priority: it runs in the step after the switch.
    """
    prefix = [1, 4, 6, *(6 + (7 * i) % 94 for i in range(157))]
    prompts = [[*prefix, 6 + i] for i in range(2 * SEATS)]
    directory = publish_weights(tmp_path, models.published[1], 1, overrides=reference.canary(models.published[1]))
    running, waiting = prompts[:SEATS], prompts[SEATS:]
    hits = metric(server, "vllm:prefix_cache_hits_total")
    async with all_seats_taken(server, running):
        await asyncio.to_thread(wait_for_metric, server, "vllm:prefix_cache_hits_total", hits)
        requests = [server.request(prompt, max_tokens=16) for prompt in waiting]
        sent = asyncio.create_task(generate_all(server, requests, lambda: None))
        await asyncio.to_thread(wait_for_metric, server, "vllm:num_requests_waiting", len(waiting) - 1)
        finished = metric(server, "vllm:request_success_total")
        answer = await asyncio.to_thread(server.update, directory, 1)
        assert metric(server, "vllm:request_success_total") == finished + 1, "only the canary has ended"
    assert answer["canary_difference"] <= AGREEMENT
    for prompt, choice in zip(waiting, await sent, strict=True):
        assert versions_of(choice) == [("0.1", 0, 16)]
        expected = reference.logprobs(models.published[1], prompt, choice["token_ids"])
        assert gap(logprobs_of(choice), expected) <= AGREEMENT
