"""HTTP requests with httpx: single ones that block, a client for an event loop, one exception for both and for aiohttp.

Requests of rollouts use aiohttp, which needs less CPU time (docs/design/rollouts.md).
"""

import json
import os
import ssl
import sys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from prime_rl.core.errors import RunError
from prime_rl.core.loopback import is_loopback

if TYPE_CHECKING:
    import httpx  # with its own imports a third of a second, which each worker of an environment would pay


@cache
def _tls_context() -> ssl.SSLContext:
    """Trust the certificates of the system, or of SSL_CERT_FILE; each client of httpx would load those of certifi."""
    return ssl.create_default_context()


def send_request(method: str, url: str, timeout_seconds: float, **options: Any) -> "httpx.Response":
    """Send one request, with options of `httpx.request`, and follow redirects.

    Uses the proxy of the environment variables, but never for a request to this machine.

    Raises:
        ConnectionError: there was no response, or the URL is invalid.
    """
    import httpx

    outer = sys.exception()
    try:
        parts = urlsplit(url)
        is_direct = is_loopback(parts.hostname or "") or proxy_bypass(parts.netloc)
        proxy = None if is_direct else getproxies().get(parts.scheme)
        options |= {"trust_env": False, "follow_redirects": True, "verify": _tls_context()}
        options["proxy"] = f"http://{proxy}" if proxy and "://" not in proxy else proxy
        return httpx.request(method, url, timeout=timeout_seconds, **options)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, ImportError) as error:  # the last: a SOCKS proxy
        raise connection_error(error, outer) from None


def request_json(method: str, url: str, timeout_seconds: float, key: str | None, body: object = None) -> Any:
    """Send a request with a key, and a body as JSON; return the JSON of the answer. Raises RunError without one."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    content = None if body is None else json.dumps(body)
    try:
        response = send_request(method, url, timeout_seconds, content=content, headers=headers)
    except ConnectionError as error:
        raise RunError(f"{url} cannot be reached: {error}") from None
    if not response.is_success:
        raise RunError(f"{url} answered {response.status_code}: {' '.join(response.text.split())[:300]}")
    return response.json()


def answers(url: str, timeout_seconds: float = 5.0) -> bool:
    """Return whether a GET request is answered with status 200."""
    try:
        return send_request("GET", url, timeout_seconds).status_code == 200
    except ConnectionError:
        return False


def open_client(headers: Mapping[str, str] = {}) -> "httpx.AsyncClient":
    """Return a client without time limit that follows redirects and ignores the proxy of the environment variables."""
    import httpx

    return httpx.AsyncClient(
        headers=headers, timeout=None, trust_env=False, follow_redirects=True, verify=_tls_context()
    )


async def request(client: "httpx.AsyncClient", method: str, url: str, **options: Any) -> "httpx.Response":
    """Send a request with `client`. Raises ConnectionError if there was no response, or the URL is invalid."""
    import httpx

    outer = sys.exception()
    try:
        return await client.request(method, url, **options)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise connection_error(error, outer) from None


def connection_error(error: Exception, outer: BaseException | None = None) -> ConnectionError:
    """Return the operating system's reason for a failed request of httpx or aiohttp, or else their message.

    `outer` is the exception that was handled when the request began; it is no reason.
    """
    cause: BaseException | None = error
    seen = set[int]()
    while cause is not None and cause is not outer and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, BaseExceptionGroup):  # one for each address of the host, IPv4 last
            cause = cause.exceptions[-1]
        if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, ssl.SSLError):
            return ConnectionError(cause.errno, os.strerror(cause.errno) if cause.errno > 0 else cause.strerror)
        cause = cause.__cause__ or cause.__context__  # httpcore removes the cause
    return ConnectionError(str(error) or type(error).__name__)
