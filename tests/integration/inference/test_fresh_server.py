"""After a switch the server answers as a fresh server does that is started on the published directory (I5)."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.inference.conftest import (
    ARGUMENTS,
    Models,
    assert_greedy_outputs_equal,
    gap,
    generate_all,
    logprobs_of,
    switch_ten_times,
    versions_of,
    wait_for_metric,
)
from tests.support.server import Server, inference_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

AGREEMENT = 1e-4


@pytest.fixture(scope="module")
def fresh(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with inference_server(models.published[1], tmp_path_factory.mktemp("fresh") / "server.log", ARGUMENTS) as server:
        yield server


def _assert_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left["token_ids"] == right["token_ids"]
    assert gap(logprobs_of(left), logprobs_of(right)) <= AGREEMENT


async def test_greedy_outputs_equal_a_fresh_server(
    server: Server, fresh: Server, models: Models, tmp_path: Path
) -> None:
    switch_ten_times(server, [models.published[2], models.base, models.published[1]], tmp_path)
    assert server.policy()["hash"] == fresh.policy()["hash"]
    await assert_greedy_outputs_equal(server, fresh)


async def test_shared_prefix_requests_straddle_a_switch(server: Server, fresh: Server, models: Models) -> None:
    """200 requests, 16 at once, one prefix: those that wait across the switch read no KV of the old weights.

    Their prefix lies in the cache, computed by the old weights, and they were sent under its salt.
    """

    def switch_in_the_middle() -> None:
        start_waiting = 100
        wait_for_metric(server, "vllm:num_requests_waiting", above=start_waiting)
        wait_for_metric(server, "vllm:prefix_cache_hits_total", above=0)
        server.update(models.published[1], 1)

    prefix = [1, 4, 6, *(6 + (7 * i) % 94 for i in range(157))]
    prompts = [[*prefix, 6 + i % 90, 6 + i // 90] for i in range(200)]
    requests = [server.request(prompt, max_tokens=32) for prompt in prompts]
    choices = await generate_all(server, requests, switch_in_the_middle)
    new = [i for i, choice in enumerate(choices) if versions_of(choice) == [("0.1", 0, 32)]]
    old_first = [choice for choice in choices if versions_of(choice)[0][0] == "0.0"]
    assert len(new) >= 50
    assert len(new) + len(old_first) == 200
    assert any(len(choice["weight_versions"]) == 2 for choice in choices)
    expected = await generate_all(fresh, [fresh.request(prompts[i], max_tokens=32) for i in new], lambda: None)
    for i, choice in zip(new, expected, strict=True):
        _assert_equal(choices[i], choice)


async def test_a_dead_engine_ends_the_server(fresh: Server) -> None:
    """Requests in flight fail and the process ends with an error, in seconds (I7). Uses the fresh server up."""
    request = fresh.request([1, 2, 3], max_tokens=1900)
    sent = asyncio.create_task(asyncio.to_thread(fresh.client.post, "/inference/v1/generate", json=request))
    await asyncio.to_thread(wait_for_metric, fresh, "vllm:num_requests_running", 0)
    [engine] = fresh.engine_pids()
    os.kill(engine, signal.SIGKILL)
    assert await asyncio.to_thread(fresh.process.wait, 10) == 1
    assert "error: EngineCore (pid" in fresh.log.read_text()
    [result] = await asyncio.gather(sent, return_exceptions=True)
    assert isinstance(result, Exception) or result.status_code == 500
