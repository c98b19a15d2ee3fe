"""Connections of a process to its own machine."""

import ipaddress
import os

_HOSTS = ("127.0.0.1", "localhost")


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def bypass_proxies() -> None:
    """Have this process and its children connect to this machine without the proxy of the environment variables.

    Clients such as httpx would send requests for 127.0.0.1, with their keys, to `HTTP_PROXY`.
    """
    hosts = [host for host in (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",") if host]
    if "*" not in hosts:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(dict.fromkeys([*hosts, *_HOSTS]))
