"""What happens to a request before the engine: key, pin, version headers, routes, salt."""

import asyncio
import socket
import subprocess
import sys
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
from prime_rl.inference.policy.adapter_checks import POLICY_ADAPTER
from prime_rl.inference.policy.version_pins import VersionPins
from prime_rl.inference.policy.weight_checks import PublishedPolicy
from prime_rl.inference.request_layer import (
    PIN_HEADER,
    PINNED,
    REMOVED,
    SAMPLE_NOTHING,
    SPANS,
    AccessRules,
    RequestLayer,
    keep_known_routes,
    prepare_requests,
    sample_from_adapter,
)
from prime_rl.inference.routes import make_router
from prime_rl.inference.server import bound
from prime_rl.inference.vllm.cache_salts import CANARY_PREFIX, make_salt, replace_hash
from prime_rl.inference.vllm.engine_arguments import make_arguments
from tests.support.server import free_port

REPOSITORY = Path(__file__).parents[3]
KEY = {"Authorization": "Bearer secret"}
ROUTES = ("/v1/models", "/tokenize", "/detokenize", "/invocations", "/load", "/version", "/metrics", "/anything/new")
PROBES = ("/health", "/ping")
ADMIN = (
    "/stage_weights", "/update_weights", "/reload_weights", "/release_policy", "/pin_policy", "/unpin_policy",
    "/load_adapter", "/unload_adapter", "/measure_switch",
)  # fmt: skip
WITHOUT_KEY = AccessRules(None, is_remote=False, variable="V")


def layer(
    app: Any, access: AccessRules = WITHOUT_KEY, pins: VersionPins | None = None, version: Any = None
) -> RequestLayer:
    """The layer over an application."""
    return RequestLayer(app, access, pins or VersionPins(0), version or (lambda: PolicyVersion(0, 0)))


def http_client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


def serve(access: AccessRules) -> tuple[TestClient, MagicMock]:
    """The routes behind the layer, and the policy manager that they call."""
    policies = MagicMock()
    app = FastAPI()
    for path in (*ROUTES, *PROBES):
        app.add_api_route(path, lambda: "ok", methods=["GET", "POST"])

    @app.websocket("/v1/realtime")
    async def realtime(connection: WebSocket) -> None:
        await connection.accept()
        await connection.close()

    policies.describe.return_value = {"step": 0}
    policies.adapters.describe.return_value = {}
    app.include_router(make_router(policies, "m", access.admin_refusal, policies.adapters))
    return TestClient(layer(app, access), raise_server_exceptions=False), policies


def test_server_with_a_key_requires_it_on_every_route_except_probes() -> None:
    client, policies = serve(AccessRules("secret", is_remote=True, variable="V"))
    wrong = ["", "secret", "Bearer", "Bearer ", "Bearer other", "Bearer secrets", "Bearer secre", "Basic secret"]
    for headers in ({}, *({"Authorization": value} for value in wrong)):
        for path in (*ROUTES, *ADMIN, "/policy", "/docs", "/openapi.json", "/health/", "//health", "/Health"):
            for answer in (client.get(path, headers=headers), client.post(path, headers=headers, json={})):
                assert answer.status_code == 401, (path, headers)
                assert answer.json() == {"error": "this server needs its API key as a bearer token"}
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime", headers=headers):
            pass
    assert policies.mock_calls == []
    assert [client.get(path).status_code for path in PROBES] == [200, 200]
    assert client.options("/v1/models").status_code == 405, "a preflight request has no key"


def test_request_with_the_key_reaches_every_route() -> None:
    client, _ = serve(AccessRules("secret", is_remote=True, variable="V"))
    for headers in (KEY, {"authorization": "bearer  secret"}):
        assert {client.post(path, headers=headers).status_code for path in (*ROUTES, *PROBES)} == {200}
        assert client.get("/policy", headers=headers).json()["model"] == "m"
    with client.websocket_connect("/v1/realtime", headers=KEY):
        pass
    for path in ADMIN:
        assert client.post(path, headers=KEY).status_code not in (401, 403)


def test_remote_server_without_a_key_rejects_admin_requests() -> None:
    client, policies = serve(AccessRules.for_address("NO_SUCH_VARIABLE", "0.0.0.0"))
    for path in ADMIN:
        answer = client.post(path, json={}, headers=KEY)
        assert answer.status_code == 403, path
        assert "NO_SUCH_VARIABLE" in answer.text and "server.host" in answer.text
    assert policies.mock_calls == []
    assert {client.post(path).status_code for path in (*ROUTES, *PROBES)} == {200}


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_admin_request_with_a_content_type_of_web_forms_is_rejected(content_type: str | None) -> None:
    """A browser sends these types to other origins without a preflight."""
    client, policies = serve(AccessRules.for_address("NO_SUCH_VARIABLE", "127.0.0.1"))
    headers = {} if content_type is None else {"Content-Type": content_type}
    for path in ADMIN:
        answer = client.post(path, content=b"{}", headers=headers)
        assert answer.status_code == 415, path
        assert "Content-Type: application/json" in answer.text
    assert policies.mock_calls == []
    assert client.post("/reload_weights", json={}).status_code != 415
    charset = {"Content-Type": "application/json; charset=utf-8"}
    assert client.post("/reload_weights", content=b"{}", headers=charset).status_code != 415


def test_unexpected_error_of_an_admin_request_is_in_the_response() -> None:
    client, policies = serve(AccessRules.for_address("NO_SUCH_VARIABLE", "127.0.0.1"))
    policies.reload.side_effect = RuntimeError("a worker dropped 0.7")
    answer = client.post("/reload_weights", json={})
    assert (answer.status_code, answer.json()) == (500, {"error": "RuntimeError: a worker dropped 0.7"})


def test_local_server_without_a_key_accepts_admin_requests() -> None:
    client, _ = serve(AccessRules.for_address("NO_SUCH_VARIABLE", "127.0.0.1"))
    assert client.get("/policy").status_code == 200
    assert {client.post(path).status_code for path in ADMIN}.isdisjoint({401, 403})


@pytest.mark.parametrize(
    ("address", "is_remote"),
    [("127.0.0.1", False), ("127.1.2.3", False), ("::1", False), ("0.0.0.0", True), ("::", True), ("10.0.0.7", True),
     ("fe80::1%eth0", True), ("192.168.1.2", True)],
)  # fmt: skip
def test_access_rules_of_an_address(address: str, is_remote: bool) -> None:
    assert AccessRules.for_address("NO_SUCH_VARIABLE", address).is_remote is is_remote


def test_key_in_vllms_variable_only_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_bound_port_cannot_be_bound_by_a_second_server() -> None:
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
    """The layer over an application that responds when the test opens its gate."""

    def __init__(self, seconds: float = 60) -> None:
        self.pins, self.gate, self.started = VersionPins(seconds), asyncio.Event(), asyncio.Event()
        self.client = http_client(layer(self._app, pins=self.pins))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
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


async def test_update_waits_for_the_response_of_a_chat_completion() -> None:
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
async def test_update_does_not_wait_for_routes_with_versions(seconds: float, path: str) -> None:
    app = GatedApp(seconds)
    answer = app.post(path)
    await app.started.wait()
    async with asyncio.timeout(60):
        await app.update()
    app.gate.set()
    await answer


async def test_request_of_a_pinned_rollout_is_served_while_an_update_waits() -> None:
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


async def test_update_does_not_wait_for_a_request_of_a_named_adapter() -> None:
    """The `model` of a request is only known inside its handler."""
    app = GatedApp()
    wait = app.gate.wait

    async def sample_and_wait() -> bool:
        sample_from_adapter(PolicyVersion(0, 1))
        return await wait()

    app.gate.wait = sample_and_wait  # type: ignore[method-assign, assignment]
    answer = app.post("/v1/chat/completions")
    await app.started.wait()
    async with asyncio.timeout(60):
        await app.update()
    app.gate.set()
    assert (await answer).text == "text"


async def test_response_headers_contain_the_versions_at_start_and_end() -> None:
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


async def test_response_headers_of_a_named_adapter_contain_its_version() -> None:
    """Also if a nested task samples, and for no other request."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def sample() -> None:
            if scope["path"] == "/named":
                sample_from_adapter(PolicyVersion(0, 5))

        await asyncio.create_task(sample())
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"text"})

    async with http_client(layer(app, version=lambda: PolicyVersion(0, 9))) as client:
        named, other = await asyncio.gather(client.get("/named"), client.get("/other"))
    assert (named.headers["x-policy-version"], named.headers["x-policy-version-end"]) == ("0.5", "0.5")
    assert (other.headers["x-policy-version"], other.headers["x-policy-version-end"]) == ("0.9", "0.9")


async def test_lifespan_message_passes_unchanged() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    async def nothing(*_: object) -> dict[str, object]:
        return {}

    scope = {"type": "lifespan"}
    await layer(app)(scope, nothing, nothing)  # type: ignore[arg-type]
    assert seen == [(scope, nothing, nothing)]


def _paths(app: FastAPI) -> set[str]:
    return {str(getattr(route, "path", route)) for route in app.router.routes}


@pytest.fixture(scope="module")
def vllm_app() -> Any:
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.app import build_app

    config = InferenceConfig.model_validate({"vllm": {"enable_tokenizer_info_endpoint": True}})
    arguments = make_arguments(config, Path("configs/reverse_text/model"), on_cpu=True)
    return build_app(arguments, ("generate",), None)


async def test_every_route_of_vllm_is_listed_and_unsafe_routes_answer_404(vllm_app: FastAPI) -> None:
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


async def test_unknown_route_answers_404() -> None:
    app = FastAPI()

    @app.post("/v2/sample")
    async def sample() -> None:
        """A route of a later vLLM."""

    keep_known_routes(app)
    async with http_client(app) as client:
        assert (await client.post("/v2/sample", json={})).status_code == 404
        assert (await client.get("/openapi.json")).status_code == 200


async def test_client_request_with_the_canary_prefix_is_rejected() -> None:
    """A canary has priority, preempts running requests, and has no adapter."""
    sent: list[Any] = []
    aborted: list[str] = []

    async def add_request_async(request: Any) -> None:
        sent.append(request)

    pytest.importorskip("vllm")
    from vllm.exceptions import VLLMClientError

    async def abort(name: str, internal: bool) -> None:
        assert internal
        aborted.append(name)

    client: Any = SimpleNamespace(engine_core=SimpleNamespace(add_request_async=add_request_async), abort=abort)
    policies: Any = SimpleNamespace(policy=PublishedPolicy(PolicyVersion(0, 1), "abc", Path("/weights")))
    prepare_requests(client, policies, None, canary_prefix=f"{CANARY_PREFIX}secret-")
    add = client.engine_core.add_request_async
    names = [f"{CANARY_PREFIX}x", CANARY_PREFIX, f"{CANARY_PREFIX}secret", "canary-secre-1"]
    for name in names:
        with pytest.raises(VLLMClientError, match="the prefix 'canary-' is reserved for the server"):
            await add(SimpleNamespace(request_id=name, cache_salt=None, lora_request=None))
    assert (sent, aborted) == ([], names), "vLLM registers a request before it passes it on"
    for name in (f"{CANARY_PREFIX}secret-1", "chatcmpl-1", "a canary-x"):
        await add(SimpleNamespace(request_id=name, cache_salt="mine", lora_request=None))
    assert [request.cache_salt for request in sent] == ["abc:mine"] * 3


async def test_requests_that_do_not_pass_vllm_are_prepared_in_the_same_way() -> None:
    """Those of token streams: the same salt, and the adapter that `NamedAdapters` still serves."""
    pytest.importorskip("vllm")
    policy = PublishedPolicy(PolicyVersion(0, 1), "abc", Path("/weights"))
    client: Any = SimpleNamespace(engine_core=SimpleNamespace(add_request_async=None))
    policies: Any = SimpleNamespace(policy=policy)
    plain: Any = SimpleNamespace(request_id="generate-stream-0", cache_salt=None, lora_request=None)
    prepare_requests(client, policies, None, canary_prefix=f"{CANARY_PREFIX}secret-")(plain)
    assert (plain.cache_salt, plain.lora_request) == ("abc", None)

    def find(request: Any) -> Any:
        if request != "served":
            raise ValueError(f"adapter {request!r} was unloaded")
        return SimpleNamespace(policy=PublishedPolicy(PolicyVersion(0, 2), "def", Path("/adapter")))

    adapters: Any = SimpleNamespace(find=find)
    prepare = prepare_requests(client, policies, adapters, canary_prefix=f"{CANARY_PREFIX}secret-")
    policy_request: Any = SimpleNamespace(request_id="generate-stream-1", cache_salt="mine", lora_request=None)
    prepare(policy_request)
    assert (policy_request.cache_salt, policy_request.lora_request.lora_int_id) == ("abc:mine", POLICY_ADAPTER)
    named: Any = SimpleNamespace(request_id="generate-stream-2", cache_salt=None, lora_request="served")
    prepare(named)
    assert (named.cache_salt, named.lora_request) == ("def", "served")
    with pytest.raises(ValueError, match="adapter 'gone' was unloaded"):
        prepare(SimpleNamespace(request_id="generate-stream-3", cache_salt=None, lora_request="gone"))


hashes = st.text("0123456789abcdef", min_size=32, max_size=32)
client_salts = st.one_of(st.none(), st.text(min_size=1, max_size=20))


@given(hashes, hashes, client_salts, client_salts)
def test_salts_are_equal_only_for_equal_weights_and_equal_client_salts(
    one: str, other: str, mine: str | None, yours: str | None
) -> None:
    assert (make_salt(one, mine) == make_salt(other, yours)) == (one == other and (mine or "") == (yours or ""))


@given(hashes, hashes, client_salts)
def test_replace_hash_keeps_the_client_salt(old: str, new: str, client: str | None) -> None:
    assert replace_hash(new, make_salt(old, client)) == make_salt(new, client)
    assert replace_hash(old, make_salt(old, client)) == make_salt(old, client)


@given(hashes, st.one_of(st.none(), st.text()))
def test_replace_hash_of_any_salt_starts_with_the_hash(content_hash: str, salt: str | None) -> None:
    assert replace_hash(content_hash, salt).partition(":")[0] == content_hash


def test_reference_page_of_routes_is_up_to_date() -> None:
    command = [sys.executable, REPOSITORY / "scripts/generate_reference.py", "routes", "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
