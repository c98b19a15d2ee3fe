"""Invalid requests are refused before the engine is paused; sampling continues with the loaded version."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.integration.inference.conftest import (
    LONG,
    SAMPLED,
    Models,
    generate_all,
    metric,
    versions_of,
    wait_for_metric,
)
from tests.support.server import Server
from tests.support.tiny_model import publish_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [1, 4, 6, *range(70, 100), 2, 6, 1, 5, 6]


def _flip(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)


def _truncate(shard: Path) -> None:
    with shard.open("r+b") as stream:
        stream.truncate(shard.stat().st_size - 1)


def _lengthen_a_tensor(shard: Path) -> None:
    """The file keeps its size, but its header declares more."""
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].decode()
    end = max(int(number) for number in re.findall(r"data_offsets\":\[\d+,(\d+)\]", header))
    shard.write_bytes(content[:8] + header.replace(f",{end}]", f",{end + 1}]").encode() + content[8 + length :])


def _change_step(shard: Path) -> None:
    manifest = shard.with_name("manifest.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"step": 6}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_flip, r"{shard} differs from its manifest: tensor \S+ has another hash"),
        (Path.unlink, r"{shard} is missing; its manifest says it has \d+ bytes"),
        (_truncate, r"{shard} has \d+ bytes, its manifest says \d+"),
        (_lengthen_a_tensor, r"{shard} is truncated: tensor \S+ ends at byte \d+ of \d+"),
        (_change_step, r"{directory}/manifest.json declares branch 0, step 6; requested was branch 0, step 7"),
    ],
)
async def test_update_with_a_damaged_shard_is_refused(
    server: Server, models: Models, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    """The error names the file; the request in flight is not affected, and the repaired version is accepted."""
    tensors = load_file(models.published[1] / "model.safetensors")
    model = tmp_path / "model"
    model.mkdir()
    names = sorted(tensors)
    for number in range(3):
        save_file({name: tensors[name] for name in names[number::3]}, model / f"model-{number + 1:05}.safetensors")
    directory = publish_weights(tmp_path, model, 7)
    shard = directory / "model-00002.safetensors"
    damage(shard)

    policy, start = server.policy(), metric(server, SAMPLED)

    def update_while_sampling() -> None:
        wait_for_metric(server, SAMPLED, above=start)
        answer = server.post("/update_weights", weight_dir=str(directory), step=7)
        assert answer.status_code == 400
        assert re.fullmatch(reason.format(shard=shard, directory=directory), answer.json()["error"])
        assert server.policy() == policy

    [choice] = await generate_all(server, [server.request(PROMPT, max_tokens=300)], update_while_sampling)
    assert versions_of(choice) == [("0.0", 0, 300)]
    server.update(publish_weights(tmp_path / "again", model, 7), 7)
    assert versions_of(server.generate(PROMPT)) == [("0.7", 0, 8)]


def _widen(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].repeat(2)


def _drop(tensors: dict[str, Any]) -> None:
    del tensors["model.norm.weight"]


def _add(tensors: dict[str, Any]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_widen, "model.norm.weight of {0}/model.safetensors has shape [128], the served model has [64]"),
        (_drop, "{0} lacks tensor model.norm.weight of the served model"),
        (
            _add,
            "{0}/model.safetensors contains tensor model.layers.2.mlp.up_proj.weight, which the served model does not",
        ),
    ],
)
async def test_update_with_weights_of_another_model_is_refused(
    server: Server, models: Models, tmp_path: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    tensors = load_file(models.published[1] / "model.safetensors")
    change(tensors)
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    directory = publish_weights(tmp_path, tmp_path / "model", 7)

    start = metric(server, SAMPLED)

    def update_while_sampling() -> None:
        wait_for_metric(server, SAMPLED, above=start + 20)
        answer = server.post("/update_weights", weight_dir=str(directory), step=7)
        assert answer.status_code == 400
        assert reason.format(directory) in answer.json()["error"]

    [choice] = await generate_all(server, [server.request(PROMPT, max_tokens=300)], update_while_sampling)
    assert versions_of(choice) == [("0.0", 0, 300)]


def test_update_to_an_older_version_is_refused(server: Server, models: Models, tmp_path: Path) -> None:
    rewound = publish_weights(tmp_path, models.published[1], 1, branch=1)
    server.update(models.published[2], 2)
    older = server.post("/update_weights", weight_dir=str(models.published[1]), step=1)
    assert older.status_code == 400
    message = f"version 0.1 (branch.step) of {models.published[1]} is older than the loaded version 0.2"
    assert message in older.json()["error"]
    again = server.update(models.published[2], 2)
    assert (again["step"], again["pause_s"]) == (2, 0.0)
    assert server.update(rewound, 1, branch=1)["branch"] == 1
    assert versions_of(server.generate(PROMPT)) == [("1.1", 0, 8)]


def test_update_with_equal_weights_changes_the_version(server: Server, models: Models, tmp_path: Path) -> None:
    """A skipped step publishes v_{n+1} = v_n: nothing is loaded, but the tag changes."""
    server.update(models.published[2], 2)
    before = server.generate(PROMPT)
    server.update(publish_weights(tmp_path, models.published[2], 3), 3)
    after = server.generate(PROMPT)
    assert (versions_of(before)[0][0], versions_of(after)[0][0]) == ("0.2", "0.3")
    assert after["token_ids"] == before["token_ids"]


def test_malformed_body_is_answered_with_the_reason(server: Server) -> None:
    for body, reason in [
        ({"step": 1}, "weight_dir: Field required"),
        ({"weight_dir": "/x", "step": -1}, "step: Input should be greater than or equal to 0"),
        ({"weight_dir": "/x", "step": 1, "stepp": 1}, "stepp: Extra inputs are not permitted"),
        ({"weight_dir": "/nowhere", "step": 1}, "/nowhere/manifest.json is missing"),
    ]:
        answer = server.post("/update_weights", **body)
        assert answer.status_code == 400
        assert reason in answer.json()["error"]
    json = {"Content-Type": "application/json"}
    assert server.client.post("/update_weights", content=b"{", headers=json).status_code == 400
    assert server.client.post("/update_weights", content=b"{}").status_code == 415


def test_request_with_the_canary_prefix_is_answered_with_400(server: Server) -> None:
    """Only this route uses a client's request id unchanged; vLLM answers an unknown error with 500."""
    body = {"model": server.model, "input": "a", "max_output_tokens": 4, "request_id": "canary-x"}
    answer = server.client.post("/v1/responses", json=body)
    assert answer.status_code == 400, answer.text
    assert "the prefix 'canary-' is reserved for the server" in answer.text
    assert server.client.post("/v1/responses", json={**body, "request_id": "resp_x"}).status_code == 200


def test_second_run_is_rejected_until_the_lease_is_released(server: Server, models: Models) -> None:
    server.reload(run_id="first")
    assert server.client.get("/policy", params={"run_id": "second"}).json()["run_id"] == "first"
    for path, body in [
        ("/reload_weights", {"run_id": "second"}),
        ("/update_weights", {"weight_dir": str(models.published[1]), "step": 1, "run_id": "second"}),
        ("/update_weights", {"weight_dir": str(models.published[1]), "step": 1}),
        ("/release_policy", {"run_id": "second"}),
    ]:
        answer = server.post(path, **body)
        assert answer.status_code == 409
        assert answer.json()["error"].startswith("run first has held this server for")
    assert server.update(models.published[1], 1, run_id="first")["step"] == 1
    assert server.post("/release_policy", run_id="first").json()["run_id"] is None
    assert server.reload(run_id="second")["step"] == 0
    assert server.policy()["run_id"] == "second"
    assert server.post("/release_policy", run_id="second").status_code == 200


async def test_reload_aborts_requests_in_flight(server: Server) -> None:
    start = metric(server, SAMPLED)

    def reload() -> None:
        wait_for_metric(server, SAMPLED, above=start + 20)
        server.reload()

    requests = [server.request([*PROMPT, 6 + i], max_tokens=LONG) for i in range(20)]
    choices = await generate_all(server, requests, reload)
    assert {choice["finish_reason"] for choice in choices} == {"abort"}
    assert len(server.generate(PROMPT)["token_ids"]) == 8


def test_development_routes_answer_404(server: Server) -> None:
    assert server.post("/collective_rpc", method="load_policy").status_code == 404
    assert server.post("/reset_prefix_cache").status_code == 404
    assert server.post("/update_weight_version", new_version="9.9").status_code == 404
