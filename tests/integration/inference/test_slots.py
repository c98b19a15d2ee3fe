"""Slots: several runs share one server, each with its own adapter, version, lease, canary and pins (I5)."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.core.types import PolicyVersion
from prime_rl.rollouts.clients.inference_client import InferenceClient, InferenceError
from tests.integration.inference.conftest import (
    AGREEMENT,
    DIFFERENT,
    PROMPT,
    SAMPLED,
    Models,
    Reference,
    gap,
    generate_until_reload,
    logprobs_of,
    versions_of,
    wait_for_metric,
)
from tests.integration.inference.test_adapters import LORA, Adapters, _as, _load, _refusal, _sample, adapters
from tests.support.adapters import publish_adapter
from tests.support.server import Server, inference_server

# Unit tests of the container, the scheduler and the workers cover the parts.
pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

__all__ = ["adapters"]  # the fixture
HITS = "vllm:prefix_cache_hits_total"
A, B = {"name": "alpha", "run_id": "run a"}, {"name": "beta", "run_id": "run b"}


@pytest.fixture(scope="module")
def running(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with inference_server(models.base, tmp_path_factory.mktemp("slots") / "server.log", LORA) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    """A server with the slots alpha and beta, at version 0.0."""
    state = running.policy()
    for slot in state["slots"]:
        assert running.post("/release_policy", name=slot["name"], run_id=slot["run_id"] or "no run").status_code == 200
    for adapter in state["adapters"]:
        assert running.post("/unload_adapter", name=adapter["name"]).status_code == 200
    running.reload()
    for slot in (A, B):
        assert running.reload(**slot)["step"] == 0
    return running


async def test_switch_of_one_slot_leaves_the_others_sampling(
    server: Server, adapters: Adapters, reference: Reference, tmp_path: Path
) -> None:
    """Three slots in one batch with one prefix; one of them switches twice, to other ranks, with its canary."""
    canaried = {
        step: publish_adapter(
            tmp_path / str(step), adapters.published[step], step, overrides=reference.canary(adapters.merged[step])
        )
        for step in (1, 3)
    }
    server.update(adapters.published[2], 2, **B)

    def switch(start: float) -> None:
        for count, step in enumerate(canaried, start=1):
            wait_for_metric(server, SAMPLED, above=start + count * 800)
            assert server.update(canaried[step], step, **A)["canary_difference"] <= AGREEMENT
        assert [(slot["name"], slot["run_id"], slot["step"]) for slot in server.policy()["slots"]] == [
            ("alpha", "run a", 3), ("beta", "run b", 2),
        ]  # fmt: skip
        assert server.policy()["step"] == 0

    plain = [server.request(PROMPT, temperature=1.0, seed=i) for i in range(2)]
    requests = [body for p in plain for body in (p, _as("alpha", p), _as("beta", p))]
    choices = await generate_until_reload(server, requests, switch, ({}, A, B))
    for choice, version, model in [
        *((choice, "0.0", adapters.base) for choice in choices[::3]),
        *((choice, "0.2", adapters.merged[2]) for choice in choices[2::3]),
    ]:
        assert versions_of(choice) == [(version, 0, len(choice["token_ids"]))]
        assert gap(logprobs_of(choice), reference.logprobs(model, PROMPT, choice["token_ids"])) <= AGREEMENT
    for choice in choices[1::3]:
        spans = versions_of(choice)
        assert [version for version, _, _ in spans] == ["0.0", "0.1", "0.3"]
        end = spans[0][2]
        expected = reference.logprobs(adapters.base, PROMPT, choice["token_ids"])
        assert gap(logprobs_of(choice)[:end], expected[:end]) <= AGREEMENT
        assert gap(logprobs_of(choice)[end : end + 50], expected[end : end + 50]) > DIFFERENT


async def test_released_slot_ends_its_requests_and_makes_room(
    server: Server, adapters: Adapters, models: Models, reference: Reference
) -> None:
    server.update(adapters.published[1], 1, **A)
    server.update(adapters.published[2], 2, **B)

    def release(start: float) -> None:
        wait_for_metric(server, SAMPLED, above=start + 200)
        assert server.post("/release_policy", **A).status_code == 200

    requests = [_as(name, server.request(PROMPT, temperature=1.0, seed=0)) for name in ("alpha", "beta")]
    ended, other = await generate_until_reload(server, requests, release, (B,))
    assert (ended["finish_reason"], {version for version, _, _ in versions_of(ended)}) == ("abort", {"0.1"})
    assert len(other["token_ids"]) > len(ended["token_ids"])
    assert gap(logprobs_of(other), reference.logprobs(adapters.merged[2], PROMPT, other["token_ids"])) <= AGREEMENT
    assert server.post("/inference/v1/generate", **_as("alpha", server.request(PROMPT))).status_code == 404
    _load(server, "named", adapters.published[3], 3)
    _sample(server, reference, adapters.merged[3], "named")
    assert "in use (beta of run run b, named)" in _refusal(server, "/reload_weights", 409, **A)
    assert server.post("/unload_adapter", name="named").status_code == 200
    server.update(adapters.published[3], 3, **A)
    _sample(server, reference, adapters.merged[3], "alpha")
    for slot in (A, B):
        assert server.post("/release_policy", **slot).status_code == 200
    server.update(models.published[1], 1)
    assert "an adapter needs the base model's weights" in _refusal(server, "/reload_weights", **A)


async def test_clients_of_slots_stream_their_own_versions(
    server: Server, adapters: Adapters, reference: Reference
) -> None:
    """Two orchestrators' clients; the third run gets no slot until one is free."""
    sampling = {"temperature": 1.0, "max_tokens": 64, "seed": 0, "ignore_eos": True}
    slots = [InferenceClient(server.url, server.model, slot["run_id"], slot=slot["name"]) for slot in (A, B)]
    async with slots[0] as one, slots[1] as other:
        for client, step in ((one, 1), (other, 2)):
            await client.reset()
            assert (await client.policy()).is_ours
            await client.stage(str(adapters.published[step]), PolicyVersion(0, step))
            await client.load(str(adapters.published[step]), PolicyVersion(0, step))
            assert (await client.policy()).version == PolicyVersion(0, step)
        for generation, step in zip(
            await asyncio.gather(*(c.generate(PROMPT, sampling) for c in slots)), (1, 2), strict=True
        ):
            assert set(generation.versions.tolist()) == {step}
            expected = reference.logprobs(adapters.merged[step], PROMPT, generation.token_ids.tolist())
            assert gap(generation.logprobs.tolist(), expected) <= AGREEMENT
        async with InferenceClient(server.url, server.model, "run c", slot="gamma") as third:
            assert not (await third.policy()).is_ours
            waiting = asyncio.create_task(third.reset())
            await one.release()
            with pytest.raises(InferenceError, match="does not exist"):
                await one.generate(PROMPT, sampling)
            assert (await waiting).version == PolicyVersion(0, 0)
            assert (await third.policy()).is_ours
            await third.release()
