"""Who may read from a relay, and which paths it answers."""

import asyncio
import os
import shutil
from contextlib import asynccontextmanager

import httpx
import pytest
from tests.support.relays import publish_bytes, running_relay

from prime_rl.core.errors import ConfigError
from prime_rl_relay.relay_app import RelayAccess


@asynccontextmanager
async def served(root, key=None):
    """A client of a relay for `root`."""
    async with running_relay(root, key) as relay, httpx.AsyncClient(base_url=relay.url) as client:
        yield client


async def test_relay_with_a_key_answers_only_requests_that_send_it(tmp_path):
    publish_bytes(tmp_path, 1)
    async with served(tmp_path, "right") as client:
        for path in ("/index", "/artifacts/weights/step_1", "/files/weights/step_1/model.safetensors"):
            for key, status in (("", 401), ("Bearer wrong", 401), ("Bearer right", 200)):
                assert (await client.get(path, headers={"authorization": key})).status_code == status
        assert (await client.get("/health")).status_code == 200


async def test_relay_without_a_key_refuses_the_name_of_another_site(tmp_path):
    async with served(tmp_path) as client:
        assert (await client.get("/index", headers={"host": "evil.example"})).status_code == 403
        assert (await client.get("/index", headers={"host": "localhost:1"})).status_code == 200


def test_relay_on_another_address_needs_a_key(monkeypatch):
    monkeypatch.delenv("RELAY_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0: .* set RELAY_API_KEY"):
        RelayAccess.for_address("0.0.0.0", "RELAY_API_KEY")
    monkeypatch.setenv("RELAY_API_KEY", "key")
    assert RelayAccess.for_address("0.0.0.0", "RELAY_API_KEY").api_key == "key"


OUTSIDE = (
    "/files/run.toml", "/files/weights/step_1/..%2f..%2frun.toml", "/files/weights/step_1/%2e%2e/step_1/config.json",
    "/files/weights%2f..%2frun.toml", "/files/weights/step_1/.hidden", "/files/%2fetc/passwd", "/files/logs/x.log",
    "/artifacts/weights/step_2", "/artifacts/checkpoints/step_1", "/files/weights/step_1/", "/run.toml",
)  # fmt: skip


async def test_path_outside_the_offered_artifacts_is_not_found_and_none_can_be_written(tmp_path):
    (publish_bytes(tmp_path, 1, b"0123456789") / ".hidden").write_text("secret")
    (tmp_path / "run.toml").write_text("secret")
    async with served(tmp_path) as client:
        for path in OUTSIDE:
            answer = await client.get(path)
            assert answer.status_code == 404, path
            assert "secret" not in answer.text
        file = "/files/weights/step_1/model.safetensors"
        for method in ("PUT", "POST", "DELETE"):
            assert (await client.request(method, file)).status_code == 405
        answer = await client.get(file, headers={"range": "bytes=4-"})
        assert (answer.status_code, answer.content) == (206, b"456789")


async def test_only_listed_regular_files_of_the_run_are_sent(tmp_path):
    """A program that an environment runs may write to the run directory."""
    root, outside = tmp_path / "run", tmp_path / "outside"
    for step in range(1, 6):
        publish_bytes(root, step)
    publish_bytes(outside, 9, b"secret")
    (outside / "orchestrator.json").write_text("secret")
    first, linked = root / "weights/step_1", "config.json"
    (first / "unlisted").write_text("secret")
    (first / "link").symlink_to(outside / "orchestrator.json")
    (root / "weights/step_2" / linked).unlink()
    (root / "weights/step_2" / linked).symlink_to(outside / "orchestrator.json")
    (root / "weights/step_3" / linked).unlink()
    os.mkfifo(root / "weights/step_3" / linked)
    (root / "weights/step_4/manifest.json").unlink()
    os.mkfifo(root / "weights/step_4/manifest.json")
    (root / "weights/step_5" / linked).unlink()
    (root / "weights/step_5" / linked).mkdir()
    (root / "weights/step_6").symlink_to(outside / "weights/step_9")
    (root / "checkpoints/step_1").mkdir(parents=True)
    (root / "checkpoints/step_1/orchestrator").symlink_to(outside / "weights/step_9")
    (root / "checkpoints/step_2").symlink_to(outside)
    (outside / "COMMITTED").write_text("secret")
    (root / "heartbeats").mkdir()
    (root / "heartbeats/orchestrator.json").symlink_to(outside / "orchestrator.json")
    os.mkfifo(root / "heartbeats/trainer_0.json")
    async with served(root) as client, asyncio.timeout(60):
        for path in (
            "step_1/unlisted", "step_1/link", "step_1/manifest.json", f"step_2/{linked}", f"step_3/{linked}",
            f"step_4/{linked}", f"step_5/{linked}", f"step_6/{linked}", "step_6/model.safetensors",
        ):  # fmt: skip
            assert (await client.get(f"/files/weights/{path}")).status_code == 404, path
        for name in ("weights/step_2", "weights/step_3", "weights/step_4", "weights/step_5", "weights/step_6",
                     "checkpoints/step_1/orchestrator"):  # fmt: skip
            assert (await client.get(f"/artifacts/{name}")).status_code == 404, name
        index = (await client.get("/index")).json()
        assert index["files"] == {}
        assert sorted(index["artifacts"]) == [f"weights/step_{step}" for step in (1, 2, 3, 5)]
        assert (await client.get("/files/weights/step_1/config.json")).status_code == 200


@pytest.mark.parametrize("folder", ["weights", "checkpoints", "heartbeats"])
async def test_folder_that_is_a_link_out_of_the_run_is_not_sent(folder, tmp_path):
    outside, run = tmp_path / "outside", tmp_path / "run"
    artifact = publish_bytes(outside, 1, b"secret")
    shutil.copytree(artifact, artifact / "orchestrator")
    for file in ("step_1/COMMITTED", "orchestrator.json"):
        (artifact.parent / file).write_text("secret")
    run.mkdir()
    (run / folder).symlink_to(artifact.parent)
    async with served(run) as client:
        index = (await client.get("/index")).json()
        assert index["artifacts"] == index["files"] == {}
        for name in ("weights/step_1", "checkpoints/step_1/orchestrator"):
            assert (await client.get(f"/artifacts/{name}")).status_code == 404
            assert (await client.get(f"/files/{name}/config.json")).status_code == 404


async def test_version_in_another_directory_is_sent(tmp_path):
    """As `weight_broadcast.directory` writes it."""
    publish_bytes(tmp_path / "memory", 1, b"weights")
    (tmp_path / "run/weights").mkdir(parents=True)
    (tmp_path / "run/weights/step_1").symlink_to(tmp_path / "memory/weights/step_1")
    async with served(tmp_path / "run") as client:
        assert "weights/step_1" in (await client.get("/index")).json()["artifacts"]
        assert (await client.get("/artifacts/weights/step_1")).status_code == 200
        assert (await client.get("/files/weights/step_1/model.safetensors")).content == b"weights"
