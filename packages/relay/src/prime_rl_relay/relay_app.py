"""The HTTP application of a relay. It is read-only.

GET /index                       RelayIndex
GET /artifacts/weights/step_3    ArtifactListing
GET /files/weights/step_3/FILE   bytes; with `Range`, a part
GET /health                      200, without a key
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from prime_rl.core.api_key import has_key, read_api_key
from prime_rl.core.errors import ConfigError
from prime_rl.core.loopback import is_loopback
from prime_rl.storage.relay.run_files import ArtifactName, RunFiles

_JSON = "application/json"
_CLOSE_SECONDS = 2
"""For requests in progress, at the end."""
_T = TypeVar("_T")


class _LargeFileResponse(FileResponse):
    """Reads a file in larger blocks than the default of 64 KiB."""

    chunk_size = 1 << 20


@dataclass(frozen=True, slots=True)
class RelayAccess:
    """Who may read: clients with the key. Without a key the relay is on a loopback address, and the Host header must
    name this machine, so that a page in a browser cannot read from it.
    """

    api_key: str | None = field(repr=False)

    @classmethod
    def for_address(cls, host: str, variable: str) -> "RelayAccess":
        """Read the key from the environment, for a relay on `host`; ConfigError if other machines need one."""
        key = read_api_key(variable)
        if key is None and not is_loopback(host):
            raise ConfigError(
                f"--host {host}: other machines could read the run without a key; set {variable} to the same value for "
                "all relays and servers, or keep 127.0.0.1"
            )
        return cls(key)

    def refusal(self, request: Request) -> Response | None:
        """The response to a request that may not read; None if it may."""
        if self.api_key is not None:
            if has_key(request.headers.get("authorization", ""), self.api_key):
                return None
            return PlainTextResponse("the API key is missing or wrong", 401, {"www-authenticate": "Bearer"})
        if is_loopback(request.url.hostname or ""):
            return None
        return PlainTextResponse("the Host header does not name this machine", 403)


def make_relay_app(files: RunFiles, access: RelayAccess) -> ASGIApp:
    """Make the HTTP application that serves the files of a run to other relays and to servers."""

    async def health(request: Request) -> Response:
        return PlainTextResponse("ok")

    async def index(request: Request) -> Response:
        return Response(msgspec.json.encode(await asyncio.to_thread(files.index)), media_type=_JSON)

    async def listing(request: Request) -> Response:
        found = await _find(lambda: files.listing(ArtifactName.parse(request.path_params["name"])))
        return Response(msgspec.json.encode(found), media_type=_JSON)

    async def content(request: Request) -> Response:
        name, _, file = request.path_params["path"].rpartition("/")
        path = await _find(lambda: files.file(ArtifactName.parse(name), file))
        return _LargeFileResponse(path, media_type="application/octet-stream")

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/index", index),
            Route("/artifacts/{name:path}", listing),
            Route("/files/{path:path}", content),
        ]
    )

    async def check_access(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            refusal = access.refusal(Request(scope))
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await app(scope, receive, send)

    return check_access


class RelayServer(uvicorn.Server):
    """An HTTP server that leaves the signals to its process."""

    def __init__(self, app: ASGIApp) -> None:
        options = {"lifespan": "off", "log_level": "warning", "access_log": False}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=_CLOSE_SECONDS, **options))  # type: ignore[arg-type]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing. By default the server would end the process by the same signal when it has closed."""
        yield


async def _find(find: Callable[[], _T]) -> _T:
    """Run `find` in a thread; a file that does not exist, or that no relay offers, is a 404."""
    try:
        return await asyncio.to_thread(find)
    except (OSError, ValueError):
        raise HTTPException(404, "not here") from None
