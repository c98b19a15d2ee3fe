"""The canary after a switch: log-probabilities of the loaded weights are compared with the trainer's (I5, I6)."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.integration.inference.conftest import (
    SEATS,
    Reference,
    all_seats_taken,
    generate_all,
    metric,
    versions_of,
    wait_for_metric,
)
from tests.support.tiny_model import publish_weights

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

IDS = [6 + (7 * i) % 94 for i in range(64)]
PROMPT = [1, 4, 6, *range(70, 100), 2, 6, 1, 5, 6]


def _canary(reference: Reference, model: Path) -> dict[str, Any]:
    """The canary in the manifest of a trainer of `model`."""
    return {"token_ids": IDS, "logprobs": reference.logprobs(model, IDS[:1], IDS[1:]), "dtype": "float32"}


async def test_canary_has_priority_over_rollouts(server, models, reference, tmp_path):
    """All seats are taken and twice as many requests wait; the canary runs in the step after the switch."""
    canary = _canary(reference, models.published[1])
    directory = publish_weights(tmp_path, models.published[1], 1, overrides={"canary": canary})
    running, waiting = [[*PROMPT, 6 + i] for i in range(SEATS)], [[*PROMPT, 40 + i] for i in range(32)]
    async with all_seats_taken(server, running):
        requests = [server.request(prompt, max_tokens=8) for prompt in waiting]
        sent = asyncio.create_task(generate_all(server, requests, lambda: None))
        await asyncio.to_thread(wait_for_metric, server, "vllm:num_requests_waiting", len(waiting) - 1)
        finished = metric(server, "vllm:request_success_total")
        answer = await asyncio.to_thread(server.update, directory, 1)
        assert metric(server, "vllm:request_success_total") == finished + 1, "only the canary has ended"
    assert answer["canary_difference"] <= 1e-4
    assert server.policy()["canary_difference"] == answer["canary_difference"]
    assert [versions_of(choice) for choice in await sent] == [[("0.1", 0, 8)]] * len(waiting)


def test_weights_of_another_model_fail_the_canary(server, models, reference, tmp_path):
    """The manifest and every hash are right, but the trainer's model was another one."""
    canary = _canary(reference, models.published[2])
    directory = publish_weights(tmp_path, models.published[1], 1, overrides={"canary": canary})
    for _ in range(2):
        answer = server.post("/update_weights", weight_dir=str(directory), step=1)
        assert answer.status_code == 422
        message = f"version 0.1 of {directory} is loaded, but is not the trainer's: the largest difference between"
        assert message in answer.json()["error"]
    assert versions_of(server.generate(PROMPT))[0][0] == "0.1", "the tags name the loaded version"
    assert server.policy()["canary_difference"] > 0.5
    server.reload()
    assert server.policy()["canary_difference"] is None


def test_canary_creates_no_cache_entry(server, models, reference, tmp_path):
    canary = _canary(reference, models.published[1])
    server.update(publish_weights(tmp_path, models.published[1], 1, overrides={"canary": canary}), 1)
    hits = metric(server, "vllm:prefix_cache_hits_total")
    server.generate(IDS)
    assert metric(server, "vllm:prefix_cache_hits_total") == hits


def test_chat_response_headers_contain_the_version(server, models):
    server.update(models.published[1], 1)
    body = {"model": server.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    for path, more in [("/v1/chat/completions", body), ("/v1/completions", {"model": server.model, "prompt": [5, 6]})]:
        headers = server.post(path, **more).raise_for_status().headers
        assert (headers["x-policy-version"], headers["x-policy-version-end"]) == ("0.1", "0.1")
