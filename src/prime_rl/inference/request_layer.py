"""Every request passes these steps, in this order:

1. Authentication: 401 without the API key.
2. Version headers: the response names the policy versions between which it was sampled.
3. vLLM's application, restricted to known routes (`keep_known_routes`), which creates the engine's request.
   A token stream passes step 1 when it is opened, and its requests go on to step 5 (`generation_stream`).
4. Version pin: a request that cannot report the version of each token holds back updates of its slot (`VersionPins`).
5. Hand-over to the engine: adapter and prefix-cache salt (`prepare_requests`).
6. The scheduler corrects the salt if a weight update has overtaken the request (`vllm.salted_scheduler`).
"""

import asyncio
import ipaddress
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi.responses import JSONResponse
from loguru import logger
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prime_rl.core.api_key import has_key, read_api_key
from prime_rl.core.errors import ConfigError
from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.engine_group import CANARY_PREFIX, lora_request, make_salt
from prime_rl.inference.policy.slots import SampledPolicy, Slots
from prime_rl.inference.policy.weight_checks import POLICY_ADAPTER

if TYPE_CHECKING:
    from fastapi import FastAPI
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM

START_HEADER = "x-policy-version"
END_HEADER = "x-policy-version-end"
PIN_HEADER = "x-policy-pin"

PROBES = frozenset({"/health", "/ping"})
"""Routes that need no key: load balancers probe them without one."""

PINNED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Routes that sample and cannot report the version of a token; each request is sampled by one version."""

SPANS = frozenset({"/inference/v1/generate"})
"""The route that samples and reports the version of each token."""

SAMPLE_NOTHING = frozenset({
    "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel", "/v1/responses/render",
    "/v1/chat/completions/render", "/v1/chat/completions/derender", "/v1/completions/render",
    "/v1/completions/derender", "/v1/messages/render", "/v1/messages/count_tokens",
    "/tokenize", "/detokenize", "/tokenizer_info", "/v1/models", "/health", "/ping", "/load", "/version", "/metrics",
    "/kv_event_sources", "/start_profile", "/stop_profile", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc",
})  # fmt: skip

_SAMPLES = "samples, without versions"
REMOVED = {
    **dict.fromkeys(("/v1/chat/completions/batch", "/invocations", "/v1/systemone", "/generative_scoring"), _SAMPLES),
    "/inference/v1/abort_requests": "a client could end the requests of another",
    "/scale_elastic_ep": "the number of copies is fixed",
    "/is_scaling_elastic_ep": "the number of copies is fixed",
}
"""Routes that vLLM has under our arguments and that this server removes, and why."""


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Who may use the server. With a key: clients that send it. Without: all clients may sample, and only clients on
    this machine may use the admin routes.
    """

    api_key: str | None = field(repr=False)
    is_remote: bool  # other machines can connect
    variable: str  # environment variable of the key

    @classmethod
    def for_address(cls, variable: str, address: str) -> "AccessRules":
        """Read the key, for a server that is bound to an IP address.

        Raises ConfigError if it is invalid, or only vLLM's variable is set, which would protect half of the routes.
        """
        key = read_api_key(variable)
        # vLLM does not get the key, so it cannot log it.
        if os.environ.pop("VLLM_API_KEY", None) and key is None:
            raise ConfigError(
                f"VLLM_API_KEY is set and {variable} is not: rename it, or set --server.api-key-var VLLM_API_KEY"
            )
        return cls(key, not ipaddress.ip_address(address.partition("%")[0]).is_loopback, variable)

    @property
    def admin_refusal(self) -> str | None:
        """Why the admin routes are disabled; None if they are enabled."""
        if self.api_key is not None or not self.is_remote:
            return None
        return (
            "admin requests are disabled: other machines can connect to this server, and it has no API key; set "
            f"{self.variable} for the server and its clients, or bind the server to 127.0.0.1 (server.host)"
        )

    def allows(self, authorization: str) -> bool:
        """Whether this value of the header `Authorization` contains the key."""
        return self.api_key is None or has_key(authorization, self.api_key)


@dataclass
class _RequestContext:
    """State of one HTTP request, shared by all tasks that handle it.

    Attributes:
        pin: its pin, or "" if it needs a new one; None if no switch waits for it.
        stack: holds the pins until the response has ended.
        sampled: what it samples from, and the version of that at the hand-over to the engine.
    """

    pin: str | None
    stack: AsyncExitStack
    sampled: list[tuple[SampledPolicy, PolicyVersion]] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


_context: ContextVar[_RequestContext | None] = ContextVar("request", default=None)


async def hold_version(source: SampledPolicy) -> None:
    """Note what the current request samples from. If its route cannot report versions, wait for a pin of the source."""
    if (context := _context.get()) is None:
        return
    async with context.lock:
        if context.pin is not None and all(one is not source for one, _ in context.sampled):
            await context.stack.enter_async_context(source.pins.request(context.pin))
            if context.pin is None:  # the response has ended meanwhile, and its stack is closed
                await context.stack.aclose()
        context.sampled.append((source, source.policy.version))


@dataclass(frozen=True)
class RequestLayer:
    """ASGI middleware for steps 1 and 2 around vLLM's application with our routes. Must be the outermost.

    All tokens of a response were sampled by versions between those of its two headers, both included: a version becomes
    the loaded one before its first token is sampled. A streamed response sends its headers with the first token, so its
    second header does not cover the rest.
    """

    app: ASGIApp
    access: AccessRules
    loaded_version: Callable[[], PolicyVersion]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] in ("http", "websocket") and not self._is_authorized(scope):
            refusal = JSONResponse({"error": "this server needs its API key as a bearer token"}, 401)
            await refusal(scope, receive, send)
        elif scope["type"] != "http":
            await self.app(scope, receive, send)
        else:
            pin = _header(scope, PIN_HEADER.encode()) if scope["path"] in PINNED else None
            async with AsyncExitStack() as stack:
                _context.set(context := _RequestContext(pin, stack))
                try:
                    await self._with_version_headers(scope, receive, send, context)
                finally:
                    context.pin = None  # a task that outlives the response takes none

    def _is_authorized(self, scope: Scope) -> bool:
        # Every route that is not listed as open needs the key, also a route that a new version of vLLM adds. Browsers
        # send a preflight request without the key.
        is_open = scope.get("method") == "OPTIONS" or scope["path"] in PROBES
        return is_open or self.access.allows(_header(scope, b"authorization"))

    async def _with_version_headers(self, scope: Scope, receive: Receive, send: Send, context: _RequestContext) -> None:
        start = self.loaded_version()

        async def send_with_versions(message: Message) -> None:
            if message["type"] == "http.response.start":
                versions = start, self.loaded_version()
                if sampled := context.sampled:
                    versions = min(at for _, at in sampled), max(source.policy.version for source, _ in sampled)
                names = START_HEADER.encode(), END_HEADER.encode()
                added = [(name, str(version).encode()) for name, version in zip(names, versions, strict=True)]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        await self.app(scope, receive, send_with_versions)


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def keep_known_routes(app: "FastAPI") -> None:
    """Remove the routes of vLLM that are not listed above; they answer 404.

    A new version of vLLM, or a plugin, may add a route that samples without versions.
    """
    known = PINNED | SPANS | SAMPLE_NOTHING
    removed = [route for route in app.router.routes if getattr(route, "path", None) not in known]
    app.router.routes[:] = [route for route in app.router.routes if route not in removed]
    paths = sorted({str(getattr(route, "path", route)) for route in removed} - REMOVED.keys())
    if paths:
        logger.warning("removed unknown routes, which may mix policy versions: {}", ", ".join(paths))


def prepare_requests(client: "AsyncLLM", slots: Slots, canary_prefix: str) -> Callable[["EngineCoreRequest"], None]:
    """Pin the version of every request, and set its salt and adapter, when vLLM hands it to the engine (steps 4 and 5).

    All requests of vLLM pass `add_request_async` last, also each child of n > 1. `canary_prefix` includes the secret.
    Returns the function of step 5 for requests that do not pass vLLM; it raises ValueError for one that must not be
    sent, and VLLMNotFoundError for one of a removed adapter.
    """
    from vllm.exceptions import VLLMNotFoundError, VLLMValidationError

    core: Any = client.engine_core
    add_request = core.add_request_async

    async def add_prepared(request: "EngineCoreRequest") -> None:
        try:
            if not is_canary(request):
                await hold_version(slots.find(request.lora_request))
            prepare(request)
        except (ValueError, VLLMNotFoundError, asyncio.CancelledError) as error:
            # vLLM has registered the request already, and answers any other exception with 500.
            await client.abort(request.request_id, internal=True)
            raise VLLMValidationError(str(error)) if isinstance(error, ValueError) else error from None
        await add_request(request)

    def is_canary(request: "EngineCoreRequest") -> bool:
        return request.request_id.startswith(canary_prefix)

    def prepare(request: "EngineCoreRequest") -> None:
        if request.request_id.startswith(CANARY_PREFIX) and not is_canary(request):
            raise ValueError(f"request_id: the prefix {CANARY_PREFIX!r} is reserved for the server")
        seed = request.sampling_params.seed if request.sampling_params is not None else None
        if seed is not None and not -(2**63) <= seed < 2**63:  # the engine would die of it on a GPU
            raise ValueError(f"seed: {seed} is not a signed number of 64 bits")
        source = slots.base if is_canary(request) else slots.find(request.lora_request)
        if slots.capacity and request.lora_request is None:
            request.lora_request = lora_request(POLICY_ADAPTER)
        request.cache_salt = make_salt(source.policy.salt, request.cache_salt)

    core.add_request_async = add_prepared
    return prepare
