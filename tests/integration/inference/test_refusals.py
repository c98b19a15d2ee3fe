"""Requests that are refused, and the lease; test_distribution.py publishes damaged versions."""

import pytest

from tests.integration.inference.conftest import (
    AGREEMENT,
    CANARY,
    DIFFERENT,
    LONG,
    PROMPT,
    SAMPLED,
    generate_all,
    metric,
    versions_of,
    wait_for_metric,
)
from tests.support.tiny_model import publish_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_update_to_an_older_version_is_refused(server, models, tmp_path):
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


def test_weights_of_another_model_fail_the_canary(server, models, reference, tmp_path):
    """The manifest and every hash are right, but the trainer's model was another one."""
    right, wrong = (
        publish_weights(
            tmp_path / str(step), models.published[1], 1, overrides=reference.canary(models.published[step])
        )
        for step in (1, 2)
    )
    assert server.update(right, 1)["canary_difference"] <= AGREEMENT
    hits = metric(server, "vllm:prefix_cache_hits_total")
    server.generate(CANARY)
    assert metric(server, "vllm:prefix_cache_hits_total") == hits, "the canary leaves no entries in the prefix cache"
    server.reload()
    for _ in range(2):
        answer = server.post("/update_weights", weight_dir=str(wrong), step=1)
        assert answer.status_code == 422
        message = f"version 0.1 of {wrong} is loaded, but is not the trainer's: the largest difference between"
        assert message in answer.json()["error"]
    assert versions_of(server.generate(PROMPT))[0][0] == "0.1", "the tags name the loaded version"
    assert server.policy()["canary_difference"] > DIFFERENT
    server.reload()
    assert server.policy()["canary_difference"] is None


def test_update_with_equal_weights_changes_the_version(server, models, tmp_path):
    """A skipped step publishes v_{n+1} = v_n: nothing is loaded, but the tag changes."""
    server.update(models.published[2], 2)
    before = server.generate(PROMPT)
    server.update(publish_weights(tmp_path, models.published[2], 3), 3)
    after = server.generate(PROMPT)
    assert (versions_of(before)[0][0], versions_of(after)[0][0]) == ("0.2", "0.3")
    assert after["token_ids"] == before["token_ids"]


def test_malformed_body_is_answered_with_the_reason(server):
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


def test_second_run_is_rejected_until_the_lease_is_released(server, models):
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
        assert answer.json()["free_in_s"] > 0
    assert server.update(models.published[1], 1, run_id="first")["step"] == 1
    assert server.post("/release_policy", run_id="first").json()["run_id"] is None
    assert server.reload(run_id="second")["step"] == 0
    assert server.policy()["run_id"] == "second"
    assert server.post("/release_policy", run_id="second").status_code == 200


async def test_reload_aborts_requests_in_flight(server):
    start = metric(server, SAMPLED)

    def reload() -> None:
        wait_for_metric(server, SAMPLED, above=start + 20)
        server.reload()

    requests = [server.request([*PROMPT, 6 + i], max_tokens=LONG) for i in range(20)]
    choices = await generate_all(server, requests, reload)
    assert {choice["finish_reason"] for choice in choices} == {"abort"}
    assert len(server.generate(PROMPT)["token_ids"]) == 8
