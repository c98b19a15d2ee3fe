"""Versions that are adapters, and named adapters: the same guarantees as for full weights (I5)."""

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from prime_rl.rollouts.clients.inference_client import InferenceClient, InferenceError
from prime_rl.trainer.weights.adapter_files import merge_adapter
from tests.integration.inference.conftest import (
    ARGUMENTS,
    SAMPLED,
    Reference,
    assert_greedy_outputs_equal,
    gap,
    generate_until_reload,
    logprobs_of,
    switch_ten_times,
    versions_of,
    wait_for_metric,
)
from tests.support.adapters import make_adapter, publish_adapter
from tests.support.server import Server, inference_server
from tests.support.tiny_model import make_tiny_model

# Unit tests of the policy manager, the adapter checks and the workers' slots cover the parts.
pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

LORA = [*ARGUMENTS, "--enable-lora", "--max-loras", "2", "--max-lora-rank", "4", "--vllm.kv_cache_memory_bytes", "64M"]
AGREEMENT = 1e-4
DIFFERENT = 0.5
PROMPT = [1, 4, 6, *range(70, 100), 2, 6, 1, 5, 6]
IDS = [6 + (7 * i) % 94 for i in range(64)]


@dataclass
class Adapters:
    """Three adapters of one base model, published as steps 1 to 3, and the merged models."""

    base: Path
    published: dict[int, Path]
    merged: dict[int, Path]


def _make(root: Path, base: Path) -> Adapters:
    published, merged = {}, {}
    for step in (1, 2, 3):
        # One adapts all layers, one those of the attention, one a part of a fused layer.
        targets = {} if step == 1 else {"targets": ("q_proj", "v_proj", "o_proj")[: 4 - step]}
        adapter = make_adapter(root / f"adapter_{step}", base, seed=step, rank=5 - step, **targets)
        published[step] = publish_adapter(root / "run", adapter, step)
        merged[step] = root / f"merged_{step}"
        merge_adapter(adapter, base, merged[step])
    return Adapters(base, published, merged)


@pytest.fixture(scope="module")
def adapters(models, tmp_path_factory):
    return _make(tmp_path_factory.mktemp("adapters"), models.base)


@pytest.fixture(scope="module")
def running(models, tmp_path_factory):
    with inference_server(models.base, tmp_path_factory.mktemp("lora") / "server.log", LORA) as server:
        yield server


@pytest.fixture
def lora(running):
    for served in running.policy()["adapters"]:
        assert running.post("/unload_adapter", name=served["name"]).status_code == 200
    running.reload()
    return running


def _canary(reference: Reference, model: Path) -> dict[str, Any]:
    """The canary in the manifest of a trainer of `model`."""
    return {"token_ids": IDS, "logprobs": reference.logprobs(model, IDS[:1], IDS[1:]), "dtype": "float32"}


def _load(server: Server, name: str, directory: Path, step: int) -> dict[str, Any]:
    answer = server.post("/load_adapter", name=name, weight_dir=str(directory), step=step)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _as(name: str, request: dict[str, Any]) -> dict[str, Any]:
    return {**request, "model": name}


def _refusal(server: Server, path: str, status: int = 400, **body: Any) -> str:
    answer = server.post(path, **{key: str(value) if key == "weight_dir" else value for key, value in body.items()})
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def _sample(server: Server, reference: Reference, model: Path, name: str | None = None) -> list[int]:
    """Sample, and check the log-probabilities against `model`."""
    request = server.request(PROMPT, temperature=1.0, seed=0, max_tokens=64)
    body = request if name is None else _as(name, request)
    choice = server.post("/inference/v1/generate", **body).raise_for_status().json()["choices"][0]
    assert gap(logprobs_of(choice), reference.logprobs(model, PROMPT, choice["token_ids"])) <= AGREEMENT
    return choice["token_ids"]


def test_switch_between_adapters_changes_the_policy(lora, adapters, reference):
    """Every version, with one prompt that stays in the prefix cache; then the base model again."""
    sampled = [_sample(lora, reference, adapters.base)]
    for step, directory in adapters.published.items():
        answer = lora.update(directory, step)
        assert answer["hash"] == json.loads((directory / "manifest.json").read_text())["hash"]
        assert answer["bytes"] > 0
        sampled.append(_sample(lora, reference, adapters.merged[step]))
    lora.reload()
    assert _sample(lora, reference, adapters.base) == sampled[0]
    lora.update(adapters.published[1], 1)
    assert _sample(lora, reference, adapters.merged[1]) == sampled[1]
    assert len({tuple(tokens) for tokens in sampled}) == 4


def test_head_of_a_tied_model_is_adapted(lora, adapters, reference, tmp_path):
    """Factors of the head leave the embedding, whose weight it shares, as it is."""
    untied = tmp_path / "untied"
    shutil.copytree(adapters.base, untied)
    weights = load_file(untied / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, untied / "model.safetensors")
    config = json.loads((untied / "config.json").read_text())
    (untied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    adapter = make_adapter(tmp_path / "adapter", untied, seed=5, targets=("lm_head", "q_proj"))
    merge_adapter(adapter, untied, tmp_path / "merged")
    lora.update(publish_adapter(tmp_path / "run", adapter, 2), 2)
    _sample(lora, reference, tmp_path / "merged")


async def test_tied_model_after_ten_adapters_equals_a_fresh_server(lora, adapters, tmp_path):
    sources = [adapters.published[2], adapters.published[3], adapters.published[1]]
    switch_ten_times(lora, sources, tmp_path, publish_adapter)
    log = tmp_path / "server.log"
    with inference_server(adapters.merged[1], log, ["--vllm.kv_cache_memory_bytes", "64M"]) as fresh:
        await assert_greedy_outputs_equal(lora, fresh)


async def test_untied_model_after_ten_adapters_equals_a_fresh_server(tmp_path):
    base = make_tiny_model(tmp_path / "base", tie_word_embeddings=False, seed=4)
    adapters = _make(tmp_path, base)
    sources = [adapters.published[2], adapters.published[3], adapters.published[1]]
    with inference_server(base, tmp_path / "lora.log", LORA) as server:
        switch_ten_times(server, sources, tmp_path / "ten", publish_adapter)
        with inference_server(adapters.merged[1], tmp_path / "fresh.log", LORA) as fresh:
            await assert_greedy_outputs_equal(server, fresh)


async def test_requests_in_flight_continue_with_the_new_adapter(lora, adapters, reference, tmp_path):
    """The canaries run in the same steps."""
    canaried = [
        publish_adapter(
            tmp_path / f"canary_{step}",
            adapters.published[step],
            step,
            overrides={"canary": _canary(reference, adapters.merged[step])},
        )
        for step in (1, 2)
    ]

    def switch_twice(start: float) -> None:
        for step, directory in enumerate(canaried, start=1):
            wait_for_metric(lora, SAMPLED, above=start + step * 800)
            assert lora.update(directory, step)["canary_difference"] <= AGREEMENT

    prompts = [[*PROMPT, 10 + i] for i in range(8)]
    requests = [lora.request(p, temperature=1.0, seed=i) for i, p in enumerate(prompts)]
    choices = await generate_until_reload(lora, requests, switch_twice)
    for prompt, choice in zip(prompts, choices, strict=True):
        spans = versions_of(choice)
        assert [version for version, _, _ in spans] == ["0.0", "0.1", "0.2"]
        assert spans[-1][2] == len(choice["token_ids"])
        switch = spans[0][2]
        expected = reference.logprobs(adapters.base, prompt, choice["token_ids"])
        assert gap(logprobs_of(choice)[:switch], expected[:switch]) <= AGREEMENT
        assert gap(logprobs_of(choice)[switch : switch + 50], expected[switch : switch + 50]) > DIFFERENT


def test_altered_adapters_are_refused(lora, adapters, models, reference, tmp_path):
    lora.update(adapters.published[1], 1)

    def altered(name: str, content: bytes, file: str) -> Path:
        directory = tmp_path / name / "step_2"
        shutil.copytree(adapters.published[2], directory)
        (directory / file).write_bytes(content)
        return directory

    weights = bytearray((adapters.published[2] / "adapter_model.safetensors").read_bytes())
    weights[-5] ^= 1
    config = (adapters.published[2] / "adapter_config.json").read_bytes()
    flipped = altered("flipped", bytes(weights), "adapter_model.safetensors")
    scaled = altered("scaled", config.replace(b'"lora_alpha": 8', b'"lora_alpha": 9'), "adapter_config.json")
    cut = altered("cut", bytes(weights[:-64]), "adapter_model.safetensors")
    large = publish_adapter(tmp_path / "large", make_adapter(tmp_path / "a", models.base, seed=0, rank=8), 2)
    factors = load_file(make_adapter(tmp_path / "b", models.base, 0) / "adapter_model.safetensors")
    deeper = {name.replace("layers.1.", "layers.2."): factor for name, factor in factors.items()}
    save_file(deeper, tmp_path / "b" / "adapter_model.safetensors")
    alien = publish_adapter(tmp_path / "alien", tmp_path / "b", 2)
    for directory, message in [
        (flipped, "adapter_model.safetensors differs from its manifest: tensor base_model.model"),
        (scaled, "adapter_config.json differs from its manifest"),
        (cut, "adapter_model.safetensors has"),
        (large, "adapter of rank 8; this server has max_lora_rank = 4"),
        (alien, "adapts layer model.layers.2."),
    ]:
        error = _refusal(lora, "/update_weights", weight_dir=directory, step=2)
        assert message in error and str(directory) in error
        assert message in _refusal(lora, "/load_adapter", name="bad", weight_dir=directory, step=2)
    assert lora.policy()["adapters"] == []
    assert lora.policy()["step"] == 1
    _sample(lora, reference, adapters.merged[1])


def test_adapter_with_a_wrong_canary_is_rejected(lora, adapters, reference, tmp_path):
    def published(name: str, model: Path) -> Path:
        return publish_adapter(
            tmp_path / name, adapters.published[1], 1, overrides={"canary": _canary(reference, model)}
        )

    right, wrong = published("right", adapters.merged[1]), published("wrong", adapters.merged[2])
    assert _load(lora, "right", right, 1)["canary_difference"] <= AGREEMENT
    assert "is not the trainer's" in _refusal(lora, "/load_adapter", 422, name="wrong", weight_dir=wrong, step=1)
    assert [served["name"] for served in lora.policy()["adapters"]] == ["right"]
    assert lora.update(right, 1)["canary_difference"] <= AGREEMENT
    lora.reload()
    assert "is not the trainer's" in _refusal(lora, "/update_weights", 422, weight_dir=wrong, step=1)


async def test_named_adapters_are_served_together_with_the_policy(lora, adapters, reference):
    """Three adapters in one batch with one prefix; the policy switches, and the named adapters do not change."""
    _load(lora, "second", adapters.published[2], 2)
    _load(lora, "third", adapters.published[3], 3)
    _load(lora, "third", adapters.published[3], 3)
    listed = {model["id"] for model in lora.client.get("/v1/models").json()["data"]}
    assert listed == {lora.model, "second", "third"}

    def switch(start: float) -> None:
        wait_for_metric(lora, SAMPLED, above=start + 600)
        lora.update(adapters.published[1], 1)
        assert "X-Policy-Version: 0.2" in _headers(lora, "second")
        assert "X-Policy-Version: 0.1" in _headers(lora, lora.model)

    plain = [lora.request(PROMPT, temperature=1.0, seed=i) for i in range(3)]
    requests = [body for p in plain for body in (p, _as("second", p), _as("third", p))]
    choices = await generate_until_reload(lora, requests, switch)
    for choice in choices[::3]:
        assert [version for version, _, _ in versions_of(choice)] == ["0.0", "0.1"]
    for number, (version, model) in enumerate([("0.2", adapters.merged[2]), ("0.3", adapters.merged[3])], start=1):
        for choice in choices[number::3]:
            assert versions_of(choice) == [(version, 0, len(choice["token_ids"]))]
            assert gap(logprobs_of(choice), reference.logprobs(model, PROMPT, choice["token_ids"])) <= AGREEMENT


def _headers(server: Server, model: str) -> str:
    answer = server.post("/v1/completions", model=model, prompt=[5, 6], max_tokens=2).raise_for_status()
    start, end = answer.headers["x-policy-version"], answer.headers["x-policy-version-end"]
    assert start == end
    return f"X-Policy-Version: {start}"


async def test_token_streams_sample_from_the_policy_and_from_named_adapters(lora, adapters, reference):
    """A named adapter keeps its version over a switch of the policy's adapter."""
    lora.update(adapters.published[1], 1)
    _load(lora, "named", adapters.published[2], 2)
    sampling = {"temperature": 1.0, "max_tokens": 64, "seed": 0, "ignore_eos": True}
    async with InferenceClient(lora.url, lora.model, "") as policy, InferenceClient(lora.url, "named", "") as named:
        for step in (1, 3):
            lora.update(adapters.published[step], step)
            both = await asyncio.gather(policy.generate(PROMPT, sampling), named.generate(PROMPT, sampling))
            for generation, served in zip(both, (step, 2), strict=True):
                assert set(generation.versions.tolist()) == {served}
                expected = reference.logprobs(adapters.merged[served], PROMPT, generation.token_ids.tolist())
                assert gap(generation.logprobs.tolist(), expected) <= AGREEMENT
        assert policy._stream.is_offered and named._stream.is_offered
        assert lora.post("/unload_adapter", name="named").status_code == 200
        with pytest.raises(InferenceError, match="The model `named` does not exist") as caught:
            await named.generate(PROMPT, sampling)
        assert caught.value.status == 404


async def test_names_are_loaded_and_unloaded(lora, adapters, reference, models, server):
    _load(lora, "one", adapters.published[1], 1)
    assert _sample(lora, reference, adapters.merged[1], "one")
    message = "'one' is version 0.1 of"
    assert message in _refusal(lora, "/load_adapter", name="one", weight_dir=adapters.published[2], step=2)
    _load(lora, "two", adapters.published[2], 2)
    message = (
        "all 2 adapters of this server are in use (one, two); end a run, unload an adapter, or set max_loras above 2"
    )
    assert message in _refusal(lora, "/load_adapter", 409, name="three", weight_dir=adapters.published[3], step=3)
    message = "these adapters depend on the base model: one, two"
    assert message in _refusal(lora, "/update_weights", weight_dir=models.published[1], step=1)

    def unload_too_early(start: float) -> None:
        wait_for_metric(lora, SAMPLED, above=start)
        assert "1 requests sample from 'one'" in _refusal(lora, "/unload_adapter", name="one")

    [choice] = await generate_until_reload(lora, [_as("one", lora.request(PROMPT))], unload_too_early)
    assert versions_of(choice) == [("0.1", 0, len(choice["token_ids"]))]
    assert lora.post("/unload_adapter", name="one").status_code == 200
    assert "there is no adapter 'one'; the adapters are two" in _refusal(lora, "/unload_adapter", name="one")
    assert lora.post("/inference/v1/generate", **_as("one", lora.request(PROMPT))).status_code == 404
    # The name can stand for another version afterwards, without cache entries of the first one.
    _load(lora, "one", adapters.published[3], 3)
    assert _sample(lora, reference, adapters.merged[3], "one")
    for path, body in [("/load_adapter", {"name": lora.model}), ("/load_adapter", {"name": "a b"})]:
        assert "name: " in _refusal(lora, path, weight_dir=adapters.published[3], step=3, **body)
    message = "the server accepts it with enable_lora = true"
    assert message in _refusal(server, "/update_weights", weight_dir=adapters.published[1], step=1)


async def test_full_weights_with_lora_enabled_use_vllms_reload(lora, adapters, models, reference, tmp_path):
    """A server that accepts adapters also accepts full weights, with a longer pause."""
    lora.update(adapters.published[1], 1)
    lora.update(models.published[2], 2)
    _sample(lora, reference, models.published[2])
    message = "contains an adapter of the base model, but version 0.2 with all weights is loaded"
    assert message in _refusal(lora, "/update_weights", weight_dir=adapters.published[3], step=3)
    assert "an adapter needs the base model's weights" in _refusal(
        lora, "/load_adapter", name="one", weight_dir=adapters.published[1], step=1
    )
    lora.reload()
    switch_ten_times(lora, [models.published[2], models.base, models.published[1]], tmp_path)
    _sample(lora, reference, models.published[1])
    lora.reload()
    _load(lora, "one", adapters.published[1], 1)
    _sample(lora, reference, adapters.merged[1], "one")
    _sample(lora, reference, adapters.base)
    assert "adapters wrap its layers" in lora.post("/measure_switch").json()["error"]
