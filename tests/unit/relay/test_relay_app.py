"""Who may read from a relay, and which paths it answers."""

import httpx
import pytest

from prime_rl.core.errors import ConfigError
from prime_rl.relay.relay_app import RelayAccess
from tests.support.relays import publish_bytes, running_relay


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
