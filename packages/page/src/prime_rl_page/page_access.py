"""Who may read the page, and the headers that make the text of rollouts harmless in a browser."""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prime_rl.core.api_key import has_key, read_api_key
from prime_rl.core.errors import ConfigError
from prime_rl.core.loopback import is_loopback

COOKIE = "prime_rl_page"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_MAX_FORM_BYTES = 4096
_ACTION = re.compile(r"/api/runs/[^/]+/(chat|notes)")
_MAX_ACTION_BYTES = {"chat": 2**21, "notes": 65_536}
_LOGIN = """<!doctype html><html lang="en"><meta charset="utf-8"><title>prime-rl</title>
<link rel="stylesheet" href="/static/style.css">
<form class="login" method="post" action="/login"><h1>prime-rl</h1><p>{text}</p>
<input type="password" name="key" aria-label="API key" autofocus autocomplete="current-password">
<button>Open</button></form></html>"""


@dataclass(frozen=True, slots=True)
class PageAccess:
    """Readers need the key if other machines can connect.

    On a loopback address without a key, the Host header must name this machine. A page of another site cannot read
    this one by resolving its own name to 127.0.0.1.
    """

    api_key: str | None = field(repr=False)
    is_remote: bool

    @classmethod
    def for_address(cls, host: str, variable: str) -> "PageAccess":
        """Read the key from the environment, for a server that listens on `host`.

        Raises:
            ConfigError: the address is not a loopback address, and there is no key.
        """
        is_remote = not is_loopback(host)
        key = read_api_key(variable)
        if is_remote and key is None:
            raise ConfigError(
                f"--host {host}: other machines could read the page without a key; set {variable}, or keep 127.0.0.1 "
                f"and use `ssh -L`"
            )
        return cls(key if is_remote else None, is_remote)

    def allows(self, headers: Headers, cookie: str | None) -> bool:
        """Whether the request has the key; if there is no key, whether it names a loopback host."""
        if self.api_key is None:
            return is_loopback(_host_of(headers.get("host", "")))
        if has_key(headers.get("authorization", ""), self.api_key):
            return True
        return cookie is not None and secrets.compare_digest(cookie.encode(), self.cookie_value().encode())

    def cookie_value(self) -> str:
        """The cookie of a reader who has entered the key. It does not contain the key."""
        return hmac.new((self.api_key or "").encode(), b"prime_rl.page/1", hashlib.sha256).hexdigest()

    def logs_in(self, form: bytes) -> bool:
        """Whether the body of the login form contains the key."""
        given = parse_qs(form.decode(errors="replace")).get("key", [""])[0].strip()
        return self.api_key is not None and secrets.compare_digest(given.encode(), self.api_key.encode())


class AccessLayer:
    """ASGI middleware: checks each request and adds the headers. Only login, notes and chat are not GET."""

    def __init__(self, app: ASGIApp, access: PageAccess) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        request = Request(scope, receive)
        refusal = await self._refusal(request)
        await (refusal or self._app)(scope, receive, send_with_headers)

    async def _refusal(self, request: Request) -> Response | None:
        access = self._access
        if request.url.path == "/login" and access.api_key is not None and request.method == "POST":
            return await self._log_in(request)
        if request.method == "POST" and (action := _ACTION.fullmatch(request.url.path)):
            if (refusal := _check_action(request.headers, action[1])) is not None:
                return refusal
        elif request.method not in ("GET", "HEAD"):
            return PlainTextResponse("the page only reads the run, besides its notes", 405)
        if request.url.path == "/static/style.css" or access.allows(request.headers, request.cookies.get(COOKIE)):
            return None
        if access.api_key is None:
            return PlainTextResponse("the Host header does not name this machine; open http://127.0.0.1", 403)
        if request.url.path == "/":
            return HTMLResponse(_LOGIN.format(text="Enter the API key of the run."), 401)
        return PlainTextResponse("the API key is missing", 401, headers={"www-authenticate": "Bearer"})

    async def _log_in(self, request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_FORM_BYTES:
                return PlainTextResponse("the form is too long", 413)
        if not self._access.logs_in(body):
            return HTMLResponse(_LOGIN.format(text="This is not the API key of the run."), 401)
        response = RedirectResponse("/", 303)
        response.set_cookie(COOKIE, self._access.cookie_value(), httponly=True, samesite="strict", path="/")
        return response


def _check_action(headers: Headers, name: str) -> Response | None:
    """Refuse a request from a page of another site, which can send no JSON unasked, and one that is too long."""
    origin, length = headers.get("origin"), headers.get("content-length", "")
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return PlainTextResponse(f"{name}: send application/json", 415)
    if origin is not None and urlsplit(origin).netloc != headers.get("host"):
        return PlainTextResponse(f"{name}: only from this page", 403)
    if not length.isdecimal() or int(length) > _MAX_ACTION_BYTES[name]:
        return PlainTextResponse(f"{name}: at most {_MAX_ACTION_BYTES[name]} bytes", 413)
    return None


def _host_of(header: str) -> str:
    """The Host header without its port."""
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]
