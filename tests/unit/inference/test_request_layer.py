"""What happens to a request before the engine: key, pin, version headers, routes, salt."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from prime_rl.configs.inference import InferenceConfig
from prime_rl.core.errors import ConfigError
from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.engine_group import CANARY_PREFIX, lora_request, make_salt, replace_hash
from prime_rl.inference.policy.policy_manager import VersionPins
from prime_rl.inference.policy.slots import Slots
from prime_rl.inference.policy.weight_checks import POLICY_ADAPTER, CheckedVersion
from prime_rl.inference.request_layer import (
    PIN_HEADER,
    PINNED,
    REMOVED,
    SAMPLE_NOTHING,
    SPANS,
    AccessRules,
    RequestLayer,
    hold_version,
    keep_known_routes,
    prepare_requests,
)
from prime_rl.inference.routes import make_router
from prime_rl.inference.server import bound
from prime_rl.inference.vllm.engine_arguments import make_arguments
from tests.support.server import free_port

KEY = {"Authorization": "Bearer secret"}
ROUTES = ("/v1/models", "/tokenize", "/detokenize", "/invocations", "/load", "/version", "/metrics", "/anything/new")
PROBES = ("/health", "/ping")
ADMIN = (
    "/stage_weights", "/update_weights", "/reload_weights", "/release_policy", "/pin_policy", "/unpin_policy",
    "/load_adapter", "/unload_adapter", "/measure_switch",
)  # fmt: skip
WITHOUT_KEY = AccessRules(None, is_remote=False, variable="V")


def layer(app: Any, access: AccessRules = WITHOUT_KEY, version: Any = None) -> RequestLayer:
    """The layer over an application."""
    return RequestLayer(app, access, version or (lambda: PolicyVersion(0, 0)))


class Source:
    """A slot at one version."""

    def __init__(self, step: int = 0, seconds: float = 60) -> None:
        self.policy = CheckedVersion(PolicyVersion(0, step), "abc", Path("/weights"))
        self.pins = VersionPins(seconds)


def http_client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


def serve(access: AccessRules) -> tuple[TestClient, MagicMock]:
    """The routes behind the layer, and the slots that they call."""
    slots = MagicMock()
    app = FastAPI()
    for path in (*ROUTES, *PROBES):
        app.add_api_route(path, lambda: "ok", methods=["GET", "POST"])

    @app.websocket("/v1/realtime")
    async def realtime(connection: WebSocket) -> None:
        await connection.accept()
        await connection.close()

    slots.describe.return_value = {"step": 0}
    slots.adapters.describe.return_value = {}
    app.include_router(make_router(slots, "m", access.admin_refusal, slots.adapters))
    return TestClient(layer(app, access), raise_server_exceptions=False), slots


def test_server_with_a_key_requires_it_on_every_route_except_probes():
    client, slots = serve(AccessRules("secret", is_remote=True, variable="V"))
    wrong = [{"Authorization": f"{before}{key}"} for before in ("", "Bearer ", "Basic ") for key in ("", "secret")]
    wrong = [{}, *wrong[:-3], *wrong[-2:], *({"Authorization": f"Bearer {key}"} for key in ("secrets", "secre"))]
    paths = (*ROUTES, *ADMIN, "/policy", "/docs", "/openapi.json", "/health/", "//health", "/Health")
    for path, headers in [*((path, {}) for path in paths), *(("/policy", headers) for headers in wrong)]:
        for answer in (client.get(path, headers=headers), client.post(path, headers=headers, json={})):
            assert answer.status_code == 401, (path, headers)
            assert answer.json() == {"error": "this server needs its API key as a bearer token"}
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime"):
        pass
    assert slots.mock_calls == []
    assert [client.get(path).status_code for path in PROBES] == [200, 200]
    assert client.options("/v1/models").status_code == 405, "a preflight request has no key"


def test_request_with_the_key_reaches_every_route():
    client, _ = serve(AccessRules("secret", is_remote=True, variable="V"))
    assert {client.post(path, headers=KEY).status_code for path in (*ROUTES, *PROBES)} == {200}
    for headers in (KEY, {"authorization": "bearer  secret"}):
        assert client.get("/policy", headers=headers).json()["model"] == "m"
    with client.websocket_connect("/v1/realtime", headers=KEY):
        pass
    for path in ADMIN:
        assert client.post(path, headers=KEY).status_code not in (401, 403)


def test_remote_server_without_a_key_rejects_admin_requests():
    client, slots = serve(AccessRules.for_address("NO_SUCH_VARIABLE", "0.0.0.0"))
    for path in ADMIN:
        answer = client.post(path, json={}, headers=KEY)
        assert answer.status_code == 403, path
        assert "NO_SUCH_VARIABLE" in answer.text and "server.host" in answer.text
    assert slots.mock_calls == []
    assert {client.post(path).status_code for path in (*ROUTES, *PROBES)} == {200}


def test_local_server_without_a_key_accepts_admin_requests_of_no_web_form():
    """A browser sends the types of web forms to other origins without a preflight."""
    client, slots = serve(AccessRules.for_address("NO_SUCH_VARIABLE", "127.0.0.1"))
    refused = [(path, {}) for path in ADMIN]
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        refused.append(("/reload_weights", {"Content-Type": content_type}))
    for path, headers in refused:
        answer = client.post(path, content=b"{}", headers=headers)
        assert answer.status_code == 415, (path, headers)
        assert "Content-Type: application/json" in answer.text
    assert slots.mock_calls == []
    assert client.get("/policy").status_code == 200
    slots.open.side_effect = RuntimeError("a worker dropped 0.7")
    charset = {"Content-Type": "application/json; charset=utf-8"}
    answer = client.post("/reload_weights", content=b"{}", headers=charset)
    assert (answer.status_code, answer.json()) == (500, {"error": "RuntimeError: a worker dropped 0.7"})


@pytest.mark.parametrize(
    ("address", "is_remote"),
    [("127.0.0.1", False), ("127.1.2.3", False), ("::1", False), ("0.0.0.0", True), ("::", True), ("10.0.0.7", True),
     ("fe80::1%eth0", True), ("192.168.1.2", True)],
)  # fmt: skip
def test_access_rules_of_an_address(address, is_remote):
    assert AccessRules.for_address("NO_SUCH_VARIABLE", address).is_remote is is_remote


def test_key_in_vllms_variable_only_is_rejected(monkeypatch):
    """vLLM would check it on some routes only, and not on the admin routes."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with pytest.raises(ConfigError, match=r"VLLM_API_KEY is set and MY_KEY is not.*--server.api-key-var") as refused:
        AccessRules.for_address("MY_KEY", "127.0.0.1")
    assert "secret" not in str(refused.value)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert AccessRules.for_address("VLLM_API_KEY", "127.0.0.1").allows("Bearer secret")
    monkeypatch.setenv("MY_KEY", "mine")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    access = AccessRules.for_address("MY_KEY", "127.0.0.1")
    assert access.allows("Bearer mine") and not access.allows("Bearer secret")
    assert "mine" not in repr(access)


def test_bound_port_cannot_be_bound_by_a_second_server():
    """With SO_REUSEADDR alone both could bind it before they listen."""
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


class GatedApp:
    """The layer over an application that samples, and responds when the test opens its gate."""

    def __init__(self, seconds: float = 60) -> None:
        self.source, self.gate, self.started = Source(seconds=seconds), asyncio.Event(), asyncio.Event()
        self.pins = self.source.pins
        self.client = http_client(layer(self._app))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        for _ in range(2):  # two completions of one prompt
            await hold_version(self.source)
        self.started.set()
        await self.gate.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"text"})

    def post(self, path: str, pin: str = "") -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(self.client.post(path, headers={PIN_HEADER: pin} if pin else {}))

    def update(self) -> "asyncio.Task[None]":
        async def update() -> None:
            async with self.pins.update():
                pass

        return asyncio.create_task(update())


async def run_tasks() -> None:
    """Let all tasks run until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_update_waits_for_the_response_of_a_chat_completion():
    app = GatedApp()
    answer = app.post("/v1/chat/completions")
    await app.started.wait()
    update = app.update()
    await run_tasks()
    assert not update.done()
    app.gate.set()
    await asyncio.gather(answer, update)


@pytest.mark.parametrize(
    ("seconds", "path"), [(60, "/inference/v1/generate"), (60, "/v1/models"), (0, "/v1/chat/completions")]
)
async def test_update_does_not_wait_for_routes_with_versions(seconds, path):
    app = GatedApp(seconds)
    answer = app.post(path)
    await app.started.wait()
    async with asyncio.timeout(60):
        await app.update()
    app.gate.set()
    await answer


async def test_request_of_a_pinned_rollout_is_served_while_an_update_waits():
    """It must not wait for the update, which waits for the end of the rollout."""
    app = GatedApp()
    pin = await app.pins.acquire()
    update = app.update()
    await run_tasks()
    other = app.post("/v1/chat/completions")
    await run_tasks()
    assert not app.started.is_set()
    app.gate.set()
    async with asyncio.timeout(60):
        assert (await app.post("/v1/chat/completions", pin)).text == "text"
    assert not update.done() and not other.done()
    app.pins.release(pin)
    await asyncio.gather(update, other)


async def test_request_of_one_slot_neither_delays_nor_awaits_the_update_of_another():
    """The `model` of a request is only known inside its handler."""
    app, other = GatedApp(), GatedApp()
    pin = await app.pins.acquire()
    update = app.update()
    answer = other.post("/v1/chat/completions")
    await other.started.wait()
    app.pins.release(pin)
    async with asyncio.timeout(60):
        await update
    other.gate.set()
    assert (await answer).text == "text"


@pytest.mark.parametrize("waits", [False, True], ids=["samples later", "waits for a pin"])
async def test_task_that_outlives_its_response_keeps_no_pin(waits):
    """Nothing would release it."""
    source, go, tasks = Source(), asyncio.Event(), []

    async def sample() -> None:
        await go.wait()
        await hold_version(source)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        tasks.append(asyncio.create_task(sample()))
        await run_tasks()
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"later"})

    if waits:
        go.set()
    async with source.pins.update(), http_client(layer(app)) as client:
        await client.post("/v1/responses")
        assert not tasks[0].done()
    go.set()
    await tasks[0]
    async with asyncio.timeout(30), source.pins.update():
        pass


async def test_response_headers_contain_the_versions_at_start_and_end():
    """Those of the slot that was sampled, also by a nested task; else those of the server."""
    source, loaded = Source(5), PolicyVersion(0, 3)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal loaded

        async def sample() -> None:
            if scope["path"] == "/named":
                await hold_version(source)

        await asyncio.create_task(sample())
        source.policy, loaded = Source(6).policy, PolicyVersion(1, 2)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-other", b"kept")]})
        await send({"type": "http.response.body", "body": b"text"})

    async with http_client(layer(app, version=lambda: loaded)) as client:
        other, named = await asyncio.gather(client.get("/other"), client.get("/named"))
    assert (other.text, other.headers["x-other"]) == ("text", "kept")
    assert (other.headers["x-policy-version"], other.headers["x-policy-version-end"]) == ("0.3", "1.2")
    assert (named.headers["x-policy-version"], named.headers["x-policy-version-end"]) == ("0.5", "0.6")


def _paths(app: FastAPI) -> set[str]:
    return {str(getattr(route, "path", route)) for route in app.router.routes}


@pytest.fixture(scope="module")
def vllm_app():
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.app import build_app

    config = InferenceConfig.model_validate({"vllm": {"enable_tokenizer_info_endpoint": True}})
    arguments = make_arguments(config, Path("configs/reverse_text/model"), on_cpu=True)
    return build_app(arguments, ("generate",), None)


async def test_every_route_of_vllm_is_listed_and_unsafe_routes_answer_404(vllm_app):
    assert not REMOVED.keys() & (PINNED | SPANS | SAMPLE_NOTHING)
    unlisted = _paths(vllm_app) - REMOVED.keys() - PINNED - SPANS - SAMPLE_NOTHING
    assert unlisted == set(), "add them to a list of request_layer.py"
    assert (PINNED | SPANS | REMOVED.keys()) - _paths(vllm_app) == set(), "vLLM has removed them"
    keep_known_routes(vllm_app)
    assert _paths(vllm_app) >= PINNED | SPANS
    async with http_client(vllm_app) as client:
        answers = {path: (await client.post(path, json={})).status_code for path in REMOVED}
        assert answers == dict.fromkeys(REMOVED, 404)
        assert (await client.post("/v1/chat/completions", json={})).status_code == 400


async def test_unknown_route_answers_404():
    app = FastAPI()

    @app.post("/v2/sample")
    async def sample() -> None:
        """A route of a later vLLM."""

    keep_known_routes(app)
    async with http_client(app) as client:
        assert (await client.post("/v2/sample", json={})).status_code == 404
        assert (await client.get("/openapi.json")).status_code == 200


def engine_request(name: str = "x", salt: str | None = None, lora: Any = None, seed: int | None = None) -> Any:
    sampling = SimpleNamespace(seed=seed)
    return SimpleNamespace(request_id=name, cache_salt=salt, lora_request=lora, sampling_params=sampling)


class EngineClient:
    """vLLM's client, and what it has sent and aborted."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.aborted: list[str] = []
        self.engine_core = SimpleNamespace(add_request_async=self._send)

    async def _send(self, request: Any) -> None:
        self.sent.append(request)

    async def abort(self, name: str, internal: bool) -> None:
        assert internal
        self.aborted.append(name)


def preparation(client: Any = None, slots: Any = None) -> Any:
    """The function that prepares requests for the engine."""
    pytest.importorskip("vllm")
    base = Source(1)
    slots = slots or SimpleNamespace(base=base, capacity=0, find=lambda request: base)
    return prepare_requests(client or cast(Any, EngineClient()), slots, canary_prefix=f"{CANARY_PREFIX}secret-")


async def test_client_request_with_the_canary_prefix_is_rejected():
    """A canary has priority, preempts running requests, and has no adapter."""
    preparation(client := EngineClient())
    from vllm.exceptions import VLLMClientError

    add = client.engine_core.add_request_async
    names = [f"{CANARY_PREFIX}x", CANARY_PREFIX, f"{CANARY_PREFIX}secret", "canary-secre-1"]
    for name in names:
        with pytest.raises(VLLMClientError, match="the prefix 'canary-' is reserved for the server"):
            await add(engine_request(name))
    assert (client.sent, client.aborted) == ([], names), "vLLM registers a request before it passes it on"
    for name in (f"{CANARY_PREFIX}secret-1", "chatcmpl-1", "a canary-x"):
        await add(engine_request(name, "mine"))
    assert [request.cache_salt for request in client.sent] == ["abc:mine"] * 3


async def test_request_that_is_cancelled_while_it_waits_for_a_pin_is_aborted():
    """Its client has disconnected, and the engine does not know it yet."""
    client, source = EngineClient(), Source()
    preparation(client, SimpleNamespace(base=source, capacity=0, find=lambda request: source))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await client.engine_core.add_request_async(engine_request())

    async with source.pins.update(), http_client(layer(app)) as http:
        waiting = asyncio.create_task(http.post("/v1/completions"))
        await run_tasks()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert client.aborted == ["x"]


async def test_request_of_an_adapter_that_was_removed_meanwhile_answers_404():
    """Its run may get a slot again, so it is no invalid request."""
    base: Any = Source(1)
    preparation(client := EngineClient(), Slots(lambda number, name: base, ["model"], 1))
    from vllm.entrypoints.serve import create_error_response
    from vllm.exceptions import VLLMNotFoundError

    with pytest.raises(VLLMNotFoundError, match="adapter 'gone' was unloaded") as error:
        await client.engine_core.add_request_async(engine_request(lora=lora_request(2, "gone")))
    assert create_error_response(error.value).error.code == 404
    assert client.aborted == ["x"]


async def test_requests_that_do_not_pass_vllm_are_prepared_in_the_same_way():
    """Those of token streams: the same salt, and an adapter that is still served."""
    preparation()(plain := engine_request())
    assert (plain.cache_salt, plain.lora_request) == ("abc", None)
    base, named = Source(1), Source(2)
    named.policy = replace(named.policy, hash="def")
    find = {None: base, "served": named}.__getitem__
    prepare = preparation(slots=SimpleNamespace(base=base, capacity=1, find=find))
    prepare(of_policy := engine_request(salt="mine"))
    assert (of_policy.cache_salt, of_policy.lora_request.lora_int_id) == ("abc:mine", POLICY_ADAPTER)
    prepare(of_adapter := engine_request(lora="served"))
    assert (of_adapter.cache_salt, of_adapter.lora_request) == ("def", "served")


async def test_request_with_a_seed_that_the_engine_cannot_store_is_refused():
    prepare = preparation()
    for seed in (None, 0, 2**63 - 1, -(2**63)):
        prepare(engine_request(seed=seed))
    for seed in (2**63, 2**64 - 1, 2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match=rf"seed: {seed} is not a signed number of 64 bits"):
            prepare(engine_request(seed=seed))


def test_salts_are_equal_only_for_equal_weights_and_equal_client_salts():
    hashes, of_clients = ("0" * 32, "f" * 32), (None, "a", ":", "a:b", "f" * 32, f"{'f' * 32}:a")
    salts = {(old, client): make_salt(old, client) for old in hashes for client in of_clients}
    assert len(set(salts.values())) == len(salts)
    assert make_salt(hashes[0], "") == make_salt(hashes[0], None)
    for (_, client), salt in salts.items():
        for new in hashes:
            assert replace_hash(new, salt) == salts[new, client]
    for any_salt in (None, "", *of_clients):
        assert replace_hash(hashes[0], any_salt).partition(":")[0] == hashes[0]
