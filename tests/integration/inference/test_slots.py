"""Slots: several runs share one server, each with its own adapter, version, lease, canary and pins (I5)."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_rl.core.types import PolicyVersion
from prime_rl.rollouts.clients.inference_client import InferenceClient, InferenceError
from tests.integration.inference.conftest import (
    ARGUMENTS,
    SAMPLED,
    Models,
    Reference,
    gap,
    generate_until_reload,
    logprobs_of,
    metric,
    versions_of,
    wait_for_metric,
)
from tests.integration.inference.test_adapters import (
    AGREEMENT,
    DIFFERENT,
    PROMPT,
    Adapters,
    _as,
    _canary,
    _load,
    _make,
    _refusal,
    _sample,
)
from tests.support.adapters import make_adapter, publish_adapter
from tests.support.server import Server, inference_server

# Unit tests of the container, the scheduler and the workers cover the parts.
pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

LORA = [*ARGUMENTS, "--enable-lora", "--max-loras", "2", "--max-lora-rank", "4", "--vllm.kv_cache_memory_bytes", "64M"]
HITS = "vllm:prefix_cache_hits_total"
A, B = {"name": "alpha", "run_id": "run a"}, {"name": "beta", "run_id": "run b"}


@pytest.fixture(scope="module")
def adapters(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """Adapters of rank 4, 3 and 2."""
    return _make(tmp_path_factory.mktemp("adapters"), models.base)


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


def _of(server: Server, name: str) -> dict[str, Any]:
    return server.client.get("/policy", params={"name": name}).raise_for_status().json()


async def test_switch_of_one_slot_leaves_the_others_sampling(
    server: Server, adapters: Adapters, reference: Reference, tmp_path: Path
) -> None:
    """Three slots in one batch with one prefix; one of them switches twice, to other ranks, with its canary."""
    canaried = {
        step: publish_adapter(
            tmp_path / str(step),
            adapters.published[step],
            step,
            overrides={"canary": _canary(reference, adapters.merged[step])},
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


def test_slots_share_no_prefix(server: Server, adapters: Adapters, reference: Reference) -> None:
    """At version 0.0 a slot samples as the base model; each slot and version computes the prompt itself."""
    sampled = []

    def sample(model: Path, name: str | None = None) -> float:
        before = metric(server, HITS)
        sampled.append(tuple(_sample(server, reference, model, name)))
        return metric(server, HITS) - before

    sample(adapters.base)
    assert sample(adapters.base) > 0, "the prompt fills a block"
    for name in ("alpha", "beta"):
        assert sample(adapters.base, name) == 0
    assert len(set(sampled)) == 1
    server.update(adapters.published[1], 1, **A)
    assert sample(adapters.merged[1], "alpha") == 0
    assert sample(adapters.base, "beta") > 0
    server.update(adapters.published[1], 1, **B)
    assert sample(adapters.merged[1], "beta") == 0
    server.update(adapters.published[2], 2, **A)
    assert sample(adapters.merged[2], "alpha") == 0
    assert sample(adapters.merged[1], "beta") > 0
    server.update(adapters.published[3], 3)
    assert sample(adapters.merged[3]) == 0
    assert sample(adapters.merged[2], "alpha") > 0
    server.reload(**A)
    assert sample(adapters.base, "alpha") >= 0
    assert sampled[-1] == sampled[0]


def test_slots_are_refused_one_by_one(server: Server, adapters: Adapters, models: Models, tmp_path: Path) -> None:
    for step, slot in ((2, A), (1, B), (3, B)):
        server.update(adapters.published[step], step, **slot)
    first = {"weight_dir": adapters.published[1], "step": 1}
    assert "is older than the loaded version 0.2" in _refusal(server, "/update_weights", **first, **A)
    assert "run run a has held slot alpha" in _refusal(
        server, "/update_weights", 409, **first, name="alpha", run_id="c"
    )
    assert "run run b has held slot beta" in _refusal(server, "/release_policy", 409, name="beta", run_id="run a")
    full = _refusal(server, "/reload_weights", 409, name="gamma", run_id="run c")
    assert "all 2 adapters of this server are in use (alpha of run run a, beta of run run b)" in full
    assert server.post("/reload_weights", name="gamma", run_id="run c").json()["free_in_s"] <= 30
    assert full in _refusal(server, "/load_adapter", 409, name="delta", **first)
    depends = "these adapters depend on the base model: alpha, beta"
    assert depends in _refusal(server, "/update_weights", weight_dir=models.published[1], step=1)
    assert depends in _refusal(server, "/update_weights", weight_dir=models.published[2], step=2, **A)
    large = publish_adapter(tmp_path / "large", make_adapter(tmp_path / "a", models.base, seed=0, rank=8), 9)
    assert "max_lora_rank = 4" in _refusal(server, "/stage_weights", weight_dir=large, step=9, **A)
    assert (_of(server, "alpha")["step"], _of(server, "beta")["step"], server.policy()["step"]) == (2, 3, 0)
    assert (_of(server, "gamma")["step"], _of(server, "gamma")["run_id"]) == (0, None)
    assert _of(server, server.model)["max_slots"] == 2
    assert "is invalid" in _refusal(server, "/reload_weights", name="a b", run_id="run c")
    assert "there is no slot 'gamma'" in _refusal(server, "/pin_policy", name="gamma")


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


async def test_pins_of_one_slot_do_not_delay_another(server: Server, adapters: Adapters) -> None:
    pin = server.post("/pin_policy", name="alpha").json()["pin"]
    delayed = asyncio.create_task(asyncio.to_thread(server.update, adapters.published[1], 1, **A))
    await asyncio.to_thread(server.update, adapters.published[2], 2, **B)
    await asyncio.to_thread(server.update, adapters.published[3], 3)
    assert not delayed.done() and _of(server, "alpha")["step"] == 0
    for model, headers, version in [
        ("beta", {}, "0.2"),
        ("alpha", {"X-Policy-Pin": pin}, "0.0"),
        (server.model, {}, "0.3"),
    ]:
        body = {"model": model, "prompt": [5, 6], "max_tokens": 2}
        answer = server.client.post("/v1/completions", json=body, headers=headers).raise_for_status()
        assert [answer.headers[name] for name in ("x-policy-version", "x-policy-version-end")] == [version] * 2
    assert server.post("/unpin_policy", pin=pin).status_code == 200
    assert (await delayed)["step"] == 1


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
