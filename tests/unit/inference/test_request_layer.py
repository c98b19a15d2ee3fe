"""What happens to a request before the engine: key, pin, version headers, routes, salt."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
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


@pytest.mark.extended
def test_server_with_a_key_requires_it_on_every_route_except_probes():
    client, slots = serve(AccessRules("secret", is_remote=True, variable="V"))
    wrong = ["", "secret", "Bearer", "Bearer ", "Bearer other", "Bearer secrets", "Bearer secre", "Basic secret"]
    for headers in ({}, *({"Authorization": value} for value in wrong)):
        for path in (*ROUTES, *ADMIN, "/policy", "/docs", "/openapi.json", "/health/", "//health", "/Health"):
            for answer in (client.get(path, headers=headers), client.post(path, headers=headers, json={})):
                assert answer.status_code == 401, (path, headers)
                assert answer.json() == {"error": "this server needs its API key as a bearer token"}
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime", headers=headers):
            pass
    assert slots.mock_calls == []
    assert [client.get(path).status_code for path in PROBES] == [200, 200]
    assert client.options("/v1/models").status_code == 405, "a preflight request has no key"


def test_request_with_the_key_reaches_every_route():
    client, _ = serve(AccessRules("secret", is_remote=True, variable="V"))
    for headers in (KEY, {"authorization": "bearer  secret"}):
        assert {client.post(path, headers=headers).status_code for path in (*ROUTES, *PROBES)} == {200}
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


def test_admin_request_with_a_content_type_of_web_forms_is_rejected():
    """A browser sends these types to other origins without a preflight."""
    client, slots = serve(AccessRules.for_address("NO_SUCH_VARIABLE", "127.0.0.1"))
    for content_type in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {} if content_type is None else {"Content-Type": content_type}
        for path in ADMIN:
            answer = client.post(path, content=b"{}", headers=headers)
            assert answer.status_code == 415, path
            assert "Content-Type: application/json" in answer.text
    assert slots.mock_calls == []
    assert client.post("/reload_weights", json={}).status_code != 415
    charset = {"Content-Type": "application/json; charset=utf-8"}
    assert client.post("/reload_weights", content=b"{}", headers=charset).status_code != 415


def test_local_server_without_a_key_accepts_admin_requests_and_reports_unexpected_errors():
    client, slots = serve(AccessRules.for_address("NO_SUCH_VARIABLE", "127.0.0.1"))
    assert client.get("/policy").status_code == 200
    assert {client.post(path).status_code for path in ADMIN}.isdisjoint({401, 403})
    slots.open.side_effect = RuntimeError("a worker dropped 0.7")
    answer = client.post("/reload_weights", json={})
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


async def test_task_that_outlives_its_response_takes_no_pin():
    """Nothing would release it."""
    source, go, tasks = Source(), asyncio.Event(), []

    async def sample_later() -> None:
        await go.wait()
        await hold_version(source)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        tasks.append(asyncio.create_task(sample_later()))
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"later"})

    async with http_client(layer(app)) as client:
        await client.post("/v1/responses")
    go.set()
    await asyncio.gather(*tasks)
    async with asyncio.timeout(30), source.pins.update():
        pass


async def test_task_that_waits_for_a_pin_when_its_response_ends_keeps_none():
    source, tasks = Source(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        tasks.append(asyncio.create_task(hold_version(source)))
        await run_tasks()
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"later"})

    async with source.pins.update(), http_client(layer(app)) as client:
        await client.post("/v1/responses")
        assert not tasks[0].done()
    await tasks[0]
    async with asyncio.timeout(30), source.pins.update():
        pass


async def test_response_headers_contain_the_versions_at_start_and_end():
    loaded = PolicyVersion(0, 3)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal loaded
        loaded = PolicyVersion(1, 2)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-other", b"kept")]})
        await send({"type": "http.response.body", "body": b"text"})

    async with http_client(layer(app, version=lambda: loaded)) as client:
        answer = await client.get("/")
    assert answer.text == "text"
    assert answer.headers["x-other"] == "kept"
    assert (answer.headers["x-policy-version"], answer.headers["x-policy-version-end"]) == ("0.3", "1.2")


async def test_response_headers_of_an_adapter_contain_its_versions():
    """Also if a nested task samples, and for no other request."""
    source = Source(5)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def sample() -> None:
            if scope["path"] == "/named":
                await hold_version(source)

        await asyncio.create_task(sample())
        source.policy = Source(6).policy
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"text"})

    async with http_client(layer(app, version=lambda: PolicyVersion(0, 9))) as client:
        named, other = await asyncio.gather(client.get("/named"), client.get("/other"))
    assert (named.headers["x-policy-version"], named.headers["x-policy-version-end"]) == ("0.5", "0.6")
    assert (other.headers["x-policy-version"], other.headers["x-policy-version-end"]) == ("0.9", "0.9")


async def test_lifespan_message_passes_unchanged():
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    async def nothing(*_: object) -> dict[str, object]:
        return {}

    scope = {"type": "lifespan"}
    await layer(app)(scope, nothing, nothing)
    assert seen == [(scope, nothing, nothing)]


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


def engine_request(name: str = "x", salt: str | None = None, lora: Any = None, sampling: Any = None) -> Any:
    return SimpleNamespace(request_id=name, cache_salt=salt, lora_request=lora, sampling_params=sampling)


def preparation(client: Any = None, slots: Any = None) -> Any:
    """The function that prepares requests for the engine."""
    pytest.importorskip("vllm")
    client = client or SimpleNamespace(engine_core=SimpleNamespace(add_request_async=None))
    if slots is None:
        base = Source(1)
        slots = SimpleNamespace(base=base, capacity=0, find=lambda request: base)
    return prepare_requests(client, slots, canary_prefix=f"{CANARY_PREFIX}secret-")


async def test_client_request_with_the_canary_prefix_is_rejected():
    """A canary has priority, preempts running requests, and has no adapter."""
    sent: list[Any] = []
    aborted: list[str] = []

    async def add_request_async(request: Any) -> None:
        sent.append(request)

    async def abort(name: str, internal: bool) -> None:
        assert internal
        aborted.append(name)

    client: Any = SimpleNamespace(engine_core=SimpleNamespace(add_request_async=add_request_async), abort=abort)
    preparation(client)
    from vllm.exceptions import VLLMClientError

    add = client.engine_core.add_request_async
    names = [f"{CANARY_PREFIX}x", CANARY_PREFIX, f"{CANARY_PREFIX}secret", "canary-secre-1"]
    for name in names:
        with pytest.raises(VLLMClientError, match="the prefix 'canary-' is reserved for the server"):
            await add(engine_request(name))
    assert (sent, aborted) == ([], names), "vLLM registers a request before it passes it on"
    for name in (f"{CANARY_PREFIX}secret-1", "chatcmpl-1", "a canary-x"):
        await add(engine_request(name, "mine"))
    assert [request.cache_salt for request in sent] == ["abc:mine"] * 3


async def test_request_that_is_cancelled_while_it_waits_for_a_pin_is_aborted():
    """Its client has disconnected, and the engine does not know it yet."""
    aborted: list[str] = []

    async def abort(name: str, internal: bool) -> None:
        aborted.append(name)

    client: Any = SimpleNamespace(engine_core=SimpleNamespace(add_request_async=None), abort=abort)
    source = Source()
    preparation(client, SimpleNamespace(base=source, capacity=0, find=lambda request: source))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await client.engine_core.add_request_async(engine_request())

    async with source.pins.update(), http_client(layer(app)) as http:
        waiting = asyncio.create_task(http.post("/v1/completions"))
        await run_tasks()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert aborted == ["x"]


async def test_request_of_an_adapter_that_was_removed_meanwhile_answers_404():
    """Its run may get a slot again, so it is no invalid request."""
    aborted: list[str] = []

    async def abort(name: str, internal: bool) -> None:
        aborted.append(name)

    client: Any = SimpleNamespace(engine_core=SimpleNamespace(add_request_async=None), abort=abort)
    base: Any = Source(1)
    preparation(client, Slots(lambda number, name: base, ["model"], 1))
    from vllm.entrypoints.serve import create_error_response
    from vllm.exceptions import VLLMNotFoundError

    with pytest.raises(VLLMNotFoundError, match="adapter 'gone' was unloaded") as error:
        await client.engine_core.add_request_async(engine_request(lora=lora_request(2, "gone")))
    assert create_error_response(error.value).error.code == 404
    assert aborted == ["x"]


async def test_requests_that_do_not_pass_vllm_are_prepared_in_the_same_way():
    """Those of token streams: the same salt, and an adapter that is still served."""
    preparation()(plain := engine_request())
    assert (plain.cache_salt, plain.lora_request) == ("abc", None)
    base = Source(1)

    def find(request: Any) -> Any:
        if request not in (None, "served"):
            raise ValueError(f"adapter {request!r} was unloaded")
        served = SimpleNamespace(policy=CheckedVersion(PolicyVersion(0, 2), "def", Path("/adapter")))
        return served if request else base

    prepare = preparation(slots=SimpleNamespace(base=base, capacity=1, find=find))
    prepare(of_policy := engine_request(salt="mine"))
    assert (of_policy.cache_salt, of_policy.lora_request.lora_int_id) == ("abc:mine", POLICY_ADAPTER)
    prepare(named := engine_request(lora="served"))
    assert (named.cache_salt, named.lora_request) == ("def", "served")
    with pytest.raises(ValueError, match="adapter 'gone' was unloaded"):
        prepare(engine_request(lora="gone"))


async def test_request_with_a_seed_that_the_engine_cannot_store_is_refused():
    prepare = preparation()
    for seed in (None, 0, 2**63 - 1, -(2**63)):
        prepare(engine_request(sampling=SimpleNamespace(seed=seed)))
    for seed in (2**63, 2**64 - 1, 2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match=rf"seed: {seed} is not a signed number of 64 bits"):
            prepare(engine_request(sampling=SimpleNamespace(seed=seed)))


hashes = st.text("0123456789abcdef", min_size=32, max_size=32)
client_salts = st.one_of(st.none(), st.text(min_size=1, max_size=20))


@given(hashes, hashes, client_salts, client_salts)
def test_salts_are_equal_only_for_equal_weights_and_equal_client_salts(one, other, mine, yours):
    assert (make_salt(one, mine) == make_salt(other, yours)) == (one == other and (mine or "") == (yours or ""))


@given(hashes, hashes, client_salts)
def test_replace_hash_keeps_the_client_salt(old, new, client):
    assert replace_hash(new, make_salt(old, client)) == make_salt(new, client)
    assert replace_hash(old, make_salt(old, client)) == make_salt(old, client)


@given(hashes, st.one_of(st.none(), st.text()))
def test_replace_hash_of_any_salt_starts_with_the_hash(content_hash, salt):
    assert replace_hash(content_hash, salt).partition(":")[0] == content_hash
