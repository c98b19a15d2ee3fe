"""Who is let in by a server with a key, and by one without."""

import socket
from unittest.mock import MagicMock

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from prime_rl.errors import ConfigError
from prime_rl.inference.access import Access, GuardedRequests
from prime_rl.inference.routes import make_router
from prime_rl.inference.server import bound
from tests.support.server import free_port

KEY = {"Authorization": "Bearer secret"}
ROUTES = ("/v1/models", "/tokenize", "/detokenize", "/invocations", "/load", "/version", "/metrics", "/anything/new")
PROBES = ("/health", "/ping")
ADMIN = (
    "/stage_weights", "/update_weights", "/reload_weights", "/release_policy", "/pin_policy", "/unpin_policy",
    "/load_adapter", "/unload_adapter", "/measure_switch",
)  # fmt: skip


def serve(access: Access) -> tuple[TestClient, MagicMock]:
    """The routes behind the guard, and what they steer."""
    steered = MagicMock()
    app = FastAPI()
    for path in (*ROUTES, *PROBES):
        app.add_api_route(path, lambda: "ok", methods=["GET", "POST"])

    @app.websocket("/v1/realtime")
    async def realtime(connection: WebSocket) -> None:
        await connection.accept()
        await connection.close()

    steered.describe.return_value = {"step": 0}
    steered.adapters.describe.return_value = {}
    app.include_router(make_router(steered, "m", access.why_not_steered, steered.measure, steered.adapters))
    return TestClient(GuardedRequests(app, access), raise_server_exceptions=False), steered


def test_with_a_key_every_route_but_the_probes_asks_for_it() -> None:
    client, steered = serve(Access("secret", beyond=True, variable="V"))
    wrong = ["", "secret", "Bearer", "Bearer ", "Bearer other", "Bearer secrets", "Bearer secre", "Basic secret"]
    for headers in ({}, *({"Authorization": value} for value in wrong)):
        for path in (*ROUTES, *ADMIN, "/policy", "/docs", "/openapi.json", "/health/", "//health", "/Health"):
            for answer in (client.get(path, headers=headers), client.post(path, headers=headers, json={})):
                assert answer.status_code == 401, (path, headers)
                assert answer.json() == {"error": "this server needs its API key as a bearer token"}
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime", headers=headers):
            pass
    assert steered.mock_calls == []
    assert [client.get(path).status_code for path in PROBES] == [200, 200]
    assert client.options("/v1/models").status_code == 405, "what browsers ask first carries no key"


def test_with_its_key_everything_is_open() -> None:
    client, _ = serve(Access("secret", beyond=True, variable="V"))
    for headers in (KEY, {"authorization": "bearer  secret"}):
        assert {client.post(path, headers=headers).status_code for path in (*ROUTES, *PROBES)} == {200}
        assert client.get("/policy", headers=headers).json()["model"] == "m"
    with client.websocket_connect("/v1/realtime", headers=KEY):
        pass
    for path in ADMIN:
        assert client.post(path, headers=KEY).status_code not in (401, 403)


def test_without_a_key_nobody_steers_a_server_that_other_machines_reach() -> None:
    client, steered = serve(Access.of("NO_SUCH_VARIABLE", "0.0.0.0"))
    for path in ADMIN:
        answer = client.post(path, json={}, headers=KEY)
        assert answer.status_code == 403, path
        assert "NO_SUCH_VARIABLE" in answer.text and "server.host" in answer.text
    assert steered.mock_calls == []
    assert {client.post(path).status_code for path in (*ROUTES, *PROBES)} == {200}


def test_without_a_key_this_machine_steers_its_own_server() -> None:
    client, _ = serve(Access.of("NO_SUCH_VARIABLE", "127.0.0.1"))
    assert client.get("/policy").status_code == 200
    assert {client.post(path).status_code for path in ADMIN}.isdisjoint({401, 403})


@pytest.mark.parametrize("key", [None, "secret"])
def test_the_number_of_copies_is_nobodys_to_change(key: str | None) -> None:
    client, _ = serve(Access(key, beyond=False, variable="V"))
    for path in ("/scale_elastic_ep", "/is_scaling_elastic_ep"):
        assert client.post(path, headers=KEY).status_code == 404


@pytest.mark.parametrize(
    ("address", "beyond"),
    [("127.0.0.1", False), ("127.1.2.3", False), ("::1", False), ("0.0.0.0", True), ("::", True), ("10.0.0.7", True),
     ("fe80::1%eth0", True), ("192.168.1.2", True)],
)  # fmt: skip
def test_who_reaches_an_address(address: str, beyond: bool) -> None:
    assert Access.of("NO_SUCH_VARIABLE", address).beyond is beyond


def test_the_key_in_vllms_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would ask for it on some routes only, and not on those that switch the policy."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with pytest.raises(ConfigError, match=r"VLLM_API_KEY is set and MY_KEY is not.*--server.api-key-var") as refused:
        Access.of("MY_KEY", "127.0.0.1")
    assert "secret" not in str(refused.value)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert Access.of("VLLM_API_KEY", "127.0.0.1").lets_in("Bearer secret")
    monkeypatch.setenv("MY_KEY", "mine")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    access = Access.of("MY_KEY", "127.0.0.1")
    assert access.lets_in("Bearer mine") and not access.lets_in("Bearer secret")
    assert "mine" not in repr(access)


def test_a_server_that_is_still_starting_has_its_port_already() -> None:
    """By SO_REUSEADDR two could bind it, and the second would fail a minute later, or its run meet the first."""
    port = free_port()
    in_use = pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} .Address already in use")
    with bound("127.0.0.1", port), in_use, bound("127.0.0.1", port):
        pass
    with bound("127.0.0.1", port) as listener:
        listener.listen()
        with socket.create_connection(("127.0.0.1", port)):
            connection, _ = listener.accept()
            connection.close()  # leaves the port in TIME_WAIT
    with bound("127.0.0.1", port):
        pass
