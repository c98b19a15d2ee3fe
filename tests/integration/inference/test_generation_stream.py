"""Token streams to a real server: they answer what the HTTP route answers."""

import asyncio
import math
import time
from typing import Any

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


async def test_stop_string_ends_a_sample_as_on_the_http_route(server, client):
    body = server.request(PROMPT, **GREEDY) | {"output_mode": "text"}
    text = server.post("/inference/v1/generate", **body).raise_for_status().json()["choices"][0]["text"]
    stop = [text[len(text) // 2 :][:3]]
    choice = server.generate(PROMPT, **GREEDY, stop=stop)
    assert choice["finish_reason"] == "stop" and len(choice["token_ids"]) < GREEDY["max_tokens"]
    assert_equal(await client.generate(PROMPT, GREEDY | {"stop": stop}), choice)
    assert_equal(await client.generate(PROMPT, GREEDY), server.generate(PROMPT, **GREEDY))


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


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [(PROMPT, {"top_p": "much"}), (PROMPT, {"stop_token_ids": [10**6]}), ([10**6], {}), ([1] * 5000, {})],
)
async def test_invalid_request_is_refused_with_the_status_of_the_http_route(server, client, prompt, sampling):
    answer = server.post("/inference/v1/generate", **server.request(prompt, **sampling))
    with pytest.raises(InferenceError) as caught:
        await client.generate(prompt, GREEDY | sampling)
    assert caught.value.status == answer.status_code == 400
    assert f"{PATH} returned 400: " in str(caught.value)
    assert len((await client.generate(PROMPT, GREEDY)).token_ids) == GREEDY["max_tokens"], "the stream is still open"


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
