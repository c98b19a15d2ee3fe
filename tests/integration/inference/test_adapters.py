"""Versions that are adapters, and named adapters: the same guarantees as for full weights (I5)."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from prime_rl.trainer.weights.adapter_files import merge_adapter
from tests.integration.inference.conftest import (
    AGREEMENT,
    ARGUMENTS,
    PROMPT,
    SAMPLED,
    Reference,
    gap,
    generate_until_reload,
    logprobs_of,
    versions_of,
    wait_for_metric,
)
from tests.support.adapters import make_adapter, publish_adapter
from tests.support.server import Server, inference_server

# Unit tests of the policy manager, the adapter checks and the workers' slots cover the parts.
pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

LORA = [*ARGUMENTS, "--enable-lora", "--max-loras", "2", "--max-lora-rank", "4", "--vllm.kv_cache_memory_bytes", "64M"]


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


def test_altered_adapter_is_refused(lora, adapters, reference, tmp_path):
    """The workers hash its factors; tests/unit/inference/test_adapter_checks.py has the other damages."""
    lora.update(adapters.published[1], 1)
    flipped = tmp_path / "step_2"
    shutil.copytree(adapters.published[2], flipped)
    weights = bytearray((flipped / "adapter_model.safetensors").read_bytes())
    weights[-5] ^= 1
    (flipped / "adapter_model.safetensors").write_bytes(weights)
    message = f"{flipped}/adapter_model.safetensors differs from its manifest: tensor base_model.model"
    assert message in _refusal(lora, "/update_weights", weight_dir=flipped, step=2)
    assert message in _refusal(lora, "/load_adapter", name="bad", weight_dir=flipped, step=2)
    assert (lora.policy()["step"], lora.policy()["adapters"]) == (1, [])
    _sample(lora, reference, adapters.merged[1])


def test_adapter_with_a_wrong_canary_is_rejected(lora, adapters, reference, tmp_path):
    def published(name: str, model: Path) -> Path:
        return publish_adapter(tmp_path / name, adapters.published[1], 1, overrides=reference.canary(model))

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


async def test_names_are_loaded_and_unloaded(lora, adapters, reference, server):
    _load(lora, "one", adapters.published[1], 1)
    assert _sample(lora, reference, adapters.merged[1], "one")
    _load(lora, "two", adapters.published[2], 2)
    message = "all 2 adapters of this server are in use (one, two)"
    assert message in _refusal(lora, "/load_adapter", 409, name="three", weight_dir=adapters.published[3], step=3)

    def unload_too_early(start: float) -> None:
        wait_for_metric(lora, SAMPLED, above=start)
        assert "1 requests sample from 'one'" in _refusal(lora, "/unload_adapter", name="one")

    [choice] = await generate_until_reload(lora, [_as("one", lora.request(PROMPT))], unload_too_early)
    assert versions_of(choice) == [("0.1", 0, len(choice["token_ids"]))]
    assert lora.post("/unload_adapter", name="one").status_code == 200
    assert lora.post("/inference/v1/generate", **_as("one", lora.request(PROMPT))).status_code == 404
    # The name can stand for another version afterwards, without cache entries of the first one.
    _load(lora, "one", adapters.published[3], 3)
    assert _sample(lora, reference, adapters.merged[3], "one")
    message = "the server accepts it with enable_lora = true"
    assert message in _refusal(server, "/update_weights", weight_dir=adapters.published[1], step=1)


async def test_full_weights_with_lora_enabled_use_vllms_reload(lora, adapters, models, reference):
    """A server that accepts adapters also accepts full weights, with a longer pause."""
    lora.update(adapters.published[1], 1)
    lora.update(models.published[2], 2)
    _sample(lora, reference, models.published[2])
    lora.reload()
    _load(lora, "one", adapters.published[1], 1)
    _sample(lora, reference, adapters.merged[1], "one")
    _sample(lora, reference, adapters.base)
    assert "adapters wrap its layers" in lora.post("/measure_switch").json()["error"]
