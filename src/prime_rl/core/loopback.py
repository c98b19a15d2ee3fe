"""Connections of a process to its own machine."""

import os
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from prime_rl.core.api_key import is_loopback

_HOSTS = ("127.0.0.1", "localhost")


def bypass_proxies() -> None:
    """Have this process and its children connect to this machine without the proxy of the environment variables.

    Clients such as httpx would send requests for 127.0.0.1, with their keys, to `HTTP_PROXY`.
    """
    hosts = [host for host in (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",") if host]
    if "*" not in hosts:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(dict.fromkeys([*hosts, *_HOSTS]))


def open_url(request: urllib.request.Request, timeout_seconds: float) -> Any:
    """Open a request as `urllib.request.urlopen`, one to this machine without a proxy. Raises the same."""
    if is_loopback(urlsplit(request.full_url).hostname or ""):
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_seconds)
    return urllib.request.urlopen(request, timeout=timeout_seconds)


def answers(url: str, timeout_seconds: float = 5.0) -> bool:
    """Return whether a GET request is answered with status 200."""
    try:
        with open_url(urllib.request.Request(url), timeout_seconds) as response:
            return bool(response.status == 200)
    except (OSError, HTTPException):
        return False
