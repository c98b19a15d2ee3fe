"""Token streams to a real server: they answer what the HTTP route answers."""

import asyncio
import math
import time
from typing import Any

import httpx
import numpy as np
import pytest

from prime_rl.rollouts.clients.generation_messages import PATH
from prime_rl.rollouts.clients.inference_client import InferenceClient, InferenceError
from prime_rl.rollouts.rendering.messages import Generation
from tests.integration.inference.conftest import (
    METRIC_TIMEOUT_SECONDS,
    gap,
    generate_all,
    logprobs_of,
    metric,
    versions_of,
    wait_for_metric,
)
from tests.support.server import Server

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [1, 4, 6, *range(40, 60)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture
async def client(server):
    async with InferenceClient(server.url, server.model, "") as client:
        yield client
        assert client._stream.is_offered, "the requests were sent by HTTP"
        assert client._stream._connection is not None


def assert_equal(generation: Generation, choice: dict[str, Any]) -> None:
    assert generation.token_ids.tolist() == choice["token_ids"]
    assert gap(generation.logprobs.tolist(), logprobs_of(choice)) <= 1e-5
    assert generation.is_truncated == (choice["finish_reason"] == "length")
    [(version, start, end)] = versions_of(choice)
    assert (start, end) == (0, len(generation.versions))
    assert set(generation.versions.tolist()) == {int(version.split(".")[1])}


async def test_samples_equal_those_of_the_http_route(server, client):
    prompts = [[3 + (i * j + i) % 90 for j in range(8 + 9 * i)] for i in range(24)]
    choices = await generate_all(server, [server.request(prompt, **GREEDY) for prompt in prompts], lambda: None)
    generations = await asyncio.gather(*(client.generate(prompt, GREEDY) for prompt in prompts))
    for generation, choice in zip(generations, choices, strict=True):
        assert_equal(generation, choice)


async def test_seeded_group_of_one_prompt_has_the_samples_of_its_seeds(server, client):
    samplings = [GREEDY | {"temperature": 1.0, "seed": seed} for seed in range(8)]
    choices = await generate_all(server, [server.request(PROMPT, **one) for one in samplings], lambda: None)
    generations = await asyncio.gather(*(client.generate(PROMPT, one) for one in samplings))
    for generation, choice in zip(generations, choices, strict=True):
        assert_equal(generation, choice)
    assert len({tuple(generation.token_ids.tolist()) for generation in generations}) > 4


async def test_request_without_max_tokens_samples_to_the_models_length(server, client):
    prompt = [5 + i % 80 for i in range(2000)]
    sampling = {"temperature": 0.0, "ignore_eos": True}
    body = server.request(prompt, **sampling)
    del body["sampling_params"]["max_tokens"]
    [choice] = await generate_all(server, [body], lambda: None)
    assert_equal(await client.generate(prompt, sampling), choice)
    assert len(choice["token_ids"]) > 16, "vLLM's default, which the route replaces"


async def test_stop_string_ends_a_sample_as_on_the_http_route(server, client):
    body = server.request(PROMPT, **GREEDY) | {"output_mode": "text"}
    text = server.post("/inference/v1/generate", **body).raise_for_status().json()["choices"][0]["text"]
    stop = [text[len(text) // 2 :][:3]]
    choice = server.generate(PROMPT, **GREEDY, stop=stop)
    assert choice["finish_reason"] == "stop" and len(choice["token_ids"]) < GREEDY["max_tokens"]
    assert_equal(await client.generate(PROMPT, GREEDY | {"stop": stop}), choice)
    assert_equal(await client.generate(PROMPT, GREEDY), server.generate(PROMPT, **GREEDY))


async def test_versions_change_at_the_token_of_a_switch(server, client, models, reference):
    long = {"temperature": 1.0, "max_tokens": 1500, "ignore_eos": True}
    sent = [asyncio.create_task(client.generate(PROMPT, long | {"seed": seed})) for seed in range(8)]
    before = metric(server, "vllm:generation_tokens_total")
    await asyncio.to_thread(wait_for_metric, server, "vllm:generation_tokens_total", before + 400)
    await asyncio.to_thread(server.update, models.published[1], 1)
    for generation in await asyncio.gather(*sent):
        assert np.all(np.diff(generation.versions) >= 0)
        assert set(generation.versions.tolist()) == {0, 1}
        old = int((generation.versions == 0).sum())
        ids = generation.token_ids[: old + 1].tolist()
        expected = reference.logprobs(models.base, PROMPT, ids)
        assert gap(generation.logprobs[:old].tolist(), expected[:old]) <= 1e-4, "version 0 sampled them"
        assert abs(float(generation.logprobs[old]) - expected[old]) > 1e-4, "version 1 sampled the next one"
    after = await client.generate(PROMPT, GREEDY)
    logprobs = reference.logprobs(models.published[1], PROMPT, after.token_ids.tolist())
    assert gap(after.logprobs.tolist(), logprobs) <= 1e-4
    assert set(after.versions.tolist()) == {1}


async def wait_until_idle(server: Server) -> None:
    deadline = time.monotonic() + METRIC_TIMEOUT_SECONDS
    while await asyncio.to_thread(metric, server, "vllm:num_requests_running"):
        assert time.monotonic() < deadline, "the requests are still running"


@pytest.mark.parametrize("closes", [False, True])
async def test_cancelled_samples_and_those_of_a_lost_client_end_in_the_engine(server, closes):
    finished = metric(server, "vllm:request_success_total")
    async with InferenceClient(server.url, server.model, "") as client:
        long = {"temperature": 1.0, "max_tokens": 1900, "ignore_eos": True}
        sent = [asyncio.create_task(client.generate(PROMPT, long)) for _ in range(16)]
        await asyncio.to_thread(wait_for_metric, server, "vllm:num_requests_running", 0)
        if closes:
            assert client._stream._connection is not None
            client._stream._connection.close()
            client._stream.http_until = math.inf  # the retries of the requests must not start further samples
        for task in sent:
            task.cancel()
        assert all(
            isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*sent, return_exceptions=True)
        )
        await wait_until_idle(server)
    assert metric(server, 'vllm:request_success_total{engine="0",finished_reason="length"') <= finished


async def test_metrics_count_streamed_requests(server, client):
    names = ("vllm:request_success_total", "vllm:generation_tokens_total", "vllm:prompt_tokens_total")
    before = [metric(server, name) for name in names]
    await asyncio.gather(*(client.generate(PROMPT, GREEDY) for _ in range(5)))
    await asyncio.to_thread(wait_for_metric, server, names[0], before[0] + 4.5)
    added = [metric(server, name) - old for name, old in zip(names, before, strict=True)]
    assert added == [5, 5 * GREEDY["max_tokens"], 5 * len(PROMPT)]


async def test_load_counts_streamed_requests(server, client):
    def load() -> int:
        return int(httpx.get(server.url + "/load").raise_for_status().json()["server_load"])

    assert await asyncio.to_thread(load) == 0
    long = GREEDY | {"max_tokens": 1900}
    sent = [asyncio.create_task(client.generate(PROMPT, long)) for _ in range(5)]
    await asyncio.to_thread(wait_for_metric, server, "vllm:num_requests_running", 4)
    assert await asyncio.to_thread(load) == 5
    for task in sent:
        task.cancel()
    await wait_until_idle(server)
    assert await asyncio.to_thread(load) == 0


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        (PROMPT, {"temperature": -1.0}),
        (PROMPT, {"max_tokens": 0}),
        (PROMPT, {"top_p": "much"}),
        (PROMPT, {"stop_token_ids": [10**6]}),
        ([], {}),
        ([10**6], {}),
        ([1] * 5000, {}),
    ],
)
async def test_invalid_request_is_refused_with_the_status_of_the_http_route(server, client, prompt, sampling):
    answer = server.post("/inference/v1/generate", **server.request(prompt, **sampling))
    with pytest.raises(InferenceError) as caught:
        await client.generate(prompt, GREEDY | sampling)
    assert caught.value.status == answer.status_code == 400
    assert f"{PATH} returned 400: " in str(caught.value)
    assert len((await client.generate(PROMPT, GREEDY)).token_ids) == GREEDY["max_tokens"], "the stream is still open"


async def test_unknown_model_and_parameters_with_another_answer_are_refused(server):
    async with InferenceClient(server.url, "other", "") as other:
        with pytest.raises(InferenceError, match="The model `other` does not exist") as caught:
            await other.generate(PROMPT, GREEDY)
        assert caught.value.status == 404
        assert other._stream.is_offered
    async with InferenceClient(server.url, server.model, "") as client:
        with pytest.raises(InferenceError, match="prompt_logprobs needs the route /inference/v1/generate") as caught:
            await client.generate(PROMPT, GREEDY | {"prompt_logprobs": 1})
        assert caught.value.status == 400


async def test_seeded_request_with_a_chunked_prompt_is_repeatable(client):
    """The server prefills in chunks of 256 tokens; alone, the prompt has other chunks than beside other requests."""
    prompt, sampling = (
        [1, *(5 + number % 90 for number in range(700))],
        {"temperature": 1.0, "max_tokens": 12, "seed": 5},
    )
    alone = await client.generate(prompt, sampling | {"ignore_eos": True})
    others = [client.generate([2, *prompt], sampling | {"seed": seed, "ignore_eos": True}) for seed in range(4)]
    *_, beside = await asyncio.gather(*others, client.generate(prompt, sampling | {"ignore_eos": True}))
    assert beside.token_ids.tolist() == alone.token_ids.tolist()
    other = await client.generate(prompt, sampling | {"seed": 6, "ignore_eos": True})
    assert other.token_ids.tolist() != alone.token_ids.tolist()


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1])
async def test_seed_that_a_gpu_cannot_store_is_refused(client, server, seed):
    with pytest.raises(InferenceError, match="is not a signed number of 64 bits") as caught:
        await client.generate(PROMPT, GREEDY | {"seed": seed})
    assert caught.value.status == 400
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": 2, "seed": seed}
    async with httpx.AsyncClient(base_url=server.url) as http:
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert len((await client.generate(PROMPT, GREEDY | {"seed": 2**63 - 1})).token_ids) == 24


async def test_server_answers_while_one_frame_starts_many_samples(client, server):
    sampling = {"temperature": 1.0, "max_tokens": 1}
    tasks = [asyncio.create_task(client.generate(PROMPT, sampling | {"seed": seed})) for seed in range(8000)]
    await asyncio.sleep(0)
    times = []
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        for _ in range(5):
            start = time.monotonic()
            assert (await http.get("/health")).status_code == 200
            times.append(time.monotonic() - start)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (await client.generate(PROMPT, GREEDY)).token_ids.size == 24
    assert max(times) < 30
