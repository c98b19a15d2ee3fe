"""Who may ask the server for what. With a key: who has it. Without: everybody samples, only this machine steers.

vLLM asks for its key on some of its routes. Here whatever is not listed as open is closed, so that a route which a new
version of vLLM brings along is too. vLLM itself is not told the key: what does not know it cannot log it.
"""

import ipaddress
import os
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from fastapi.responses import JSONResponse

from prime_rl.api_key import read_api_key
from prime_rl.errors import ConfigError
from prime_rl.inference.version_header import App, Message

OPEN = frozenset({"/health", "/ping"})
"""Probes of load balancers bring no key; they hear that the server lives and nothing else."""
_ABSENT = ("/scale_elastic_ep", "/is_scaling_elastic_ep")
"""vLLM's routes that change the number of copies, which is fixed here."""


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one server.

    Attributes:
        api_key: that every request must bring; None asks for none.
        beyond: other machines reach the server.
        variable: environment variable of the key, for messages.
    """

    api_key: str | None = field(repr=False)
    beyond: bool
    variable: str

    @classmethod
    def of(cls, variable: str, address: str) -> "Access":
        """Read the key, for a server that is bound to an IP address.

        Raises:
            ConfigError: the key cannot be used, or stands in vLLM's variable only, where it would guard half of it.
        """
        key = read_api_key(variable)
        vllms = os.environ.pop("VLLM_API_KEY", None)
        if key is None and vllms:
            raise ConfigError(
                f"VLLM_API_KEY is set and {variable} is not: rename it, or set --server.api-key-var VLLM_API_KEY"
            )
        return cls(key, not ipaddress.ip_address(address.partition("%")[0]).is_loopback, variable)

    @property
    def why_not_steered(self) -> str | None:
        """Why nobody may use the admin routes; None where whoever gets through may."""
        if self.api_key is not None or not self.beyond:
            return None
        return (
            f"this server is reached from other machines and has no key, so it is not steered: set {self.variable} for "
            "it and its clients, or bind it to 127.0.0.1 (server.host)"
        )

    def lets_in(self, authorization: str) -> bool:
        """Whether a value of the header `Authorization` brings the key."""
        if self.api_key is None:
            return True
        scheme, _, key = authorization.partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(key.strip().encode(), self.api_key.encode())


class GuardedRequests:
    """ASGI middleware that keeps out who has no key. To be the outermost.

    Args:
        app: what it wraps.
        access: the rules.
    """

    def __init__(self, app: App, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Handle one request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path, preflight = scope["path"], scope.get("method") == "OPTIONS"  # browsers ask without the key if they may
        if path.endswith(_ABSENT):
            refusal = JSONResponse({"error": "the number of copies is fixed"}, 404)
        elif preflight or path in OPEN or self._access.lets_in(_authorization(scope)):
            await self._app(scope, receive, send)
            return
        else:
            refusal = JSONResponse({"error": "this server needs its API key as a bearer token"}, 401)
        await refusal(scope, receive, send)


def _authorization(scope: Message) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"), "")
