"""Who may read from a relay, and which paths it answers."""

import asyncio
import os

import httpx
import pytest
from tests.support.relays import publish_bytes, running_relay

from prime_rl.core.errors import ConfigError
from prime_rl_relay.relay_app import RelayAccess


async def get(url, path, **headers):
    async with httpx.AsyncClient(base_url=url) as client:
        return await client.get(path, headers=headers)


async def test_relay_with_a_key_answers_only_requests_that_send_it(tmp_path):
    publish_bytes(tmp_path, 1)
    async with running_relay(tmp_path, key="right") as relay:
        for path in ("/index", "/artifacts/weights/step_1", "/files/weights/step_1/model.safetensors"):
            assert (await get(relay.url, path)).status_code == 401
            assert (await get(relay.url, path, authorization="Bearer wrong")).status_code == 401
            assert (await get(relay.url, path, authorization="Bearer right")).status_code == 200
        assert (await get(relay.url, "/health")).status_code == 200


async def test_relay_without_a_key_refuses_the_name_of_another_site(tmp_path):
    async with running_relay(tmp_path) as relay:
        assert (await get(relay.url, "/index", host="evil.example")).status_code == 403
        assert (await get(relay.url, "/index", host="localhost:1")).status_code == 200


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


async def test_path_outside_the_offered_artifacts_is_not_found(tmp_path):
    (publish_bytes(tmp_path, 1) / ".hidden").write_text("secret")
    (tmp_path / "run.toml").write_text("secret")
    async with running_relay(tmp_path) as relay:
        for path in OUTSIDE:
            answer = await get(relay.url, path)
            assert answer.status_code == 404, path
            assert "secret" not in answer.text


async def test_file_is_sent_from_the_requested_byte(tmp_path):
    publish_bytes(tmp_path, 1, b"0123456789")
    async with running_relay(tmp_path) as relay:
        answer = await get(relay.url, "/files/weights/step_1/model.safetensors", range="bytes=4-")
        assert (answer.status_code, answer.content) == (206, b"456789")


async def test_relay_is_read_only(tmp_path):
    publish_bytes(tmp_path, 1)
    async with running_relay(tmp_path) as relay, httpx.AsyncClient(base_url=relay.url) as client:
        for method in ("PUT", "POST", "DELETE"):
            assert (await client.request(method, "/files/weights/step_1/config.json")).status_code == 405


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
    async with running_relay(root) as relay, asyncio.timeout(60):
        for path in (
            "step_1/unlisted", "step_1/link", "step_1/manifest.json", f"step_2/{linked}", f"step_3/{linked}",
            f"step_4/{linked}", f"step_5/{linked}", f"step_6/{linked}", "step_6/model.safetensors",
        ):  # fmt: skip
            assert (await get(relay.url, f"/files/weights/{path}")).status_code == 404, path
        for name in ("weights/step_2", "weights/step_3", "weights/step_4", "weights/step_5", "weights/step_6",
                     "checkpoints/step_1/orchestrator"):  # fmt: skip
            assert (await get(relay.url, f"/artifacts/{name}")).status_code == 404, name
        index = (await get(relay.url, "/index")).json()
        assert index["files"] == {}
        assert sorted(index["artifacts"]) == [f"weights/step_{step}" for step in (1, 2, 3, 5)]
        assert (await get(relay.url, "/files/weights/step_1/config.json")).status_code == 200


async def test_version_in_another_directory_is_sent(tmp_path):
    """As `weight_broadcast.directory` writes it."""
    publish_bytes(tmp_path / "memory", 1, b"weights")
    (tmp_path / "run/weights").mkdir(parents=True)
    (tmp_path / "run/weights/step_1").symlink_to(tmp_path / "memory/weights/step_1")
    async with running_relay(tmp_path / "run") as relay:
        assert "weights/step_1" in (await get(relay.url, "/index")).json()["artifacts"]
        assert (await get(relay.url, "/artifacts/weights/step_1")).status_code == 200
        assert (await get(relay.url, "/files/weights/step_1/model.safetensors")).content == b"weights"
