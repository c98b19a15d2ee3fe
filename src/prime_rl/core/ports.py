"""Addresses and TCP ports of the servers of this project."""

import errno
import socket
from contextlib import ExitStack

from prime_rl.core.errors import ConfigError, translate_error


def join_host_port(host: str, port: int | str) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_family(host: str) -> socket.AddressFamily:
    """Return the family of a socket that binds to `host`: IPv6 for an IPv6 address, otherwise IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def find_free_port() -> int:
    """Return a port on 127.0.0.1 that is free at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def claim_port(port: int) -> socket.socket:
    """Reserve `port` until the returned socket is closed or the process exits.

    Raises:
        OSError: EADDRINUSE, another process has reserved it.
    """
    # With SO_REUSEADDR, two sockets may bind one port as long as neither listens, and a server listens only after its
    # model is loaded. Without it, the port of a server that just ended is blocked for a minute. An abstract Unix
    # socket therefore represents the port in the meantime; the kernel frees it with the process.
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0prime_rl.port/{port}")
    except OSError:
        claim.close()
        raise
    return claim


def listen(host: str, port: int, flag: str) -> socket.socket:
    """Return a listening socket. Raises ConfigError, which names `flag`, if a server cannot listen on this port."""
    place = f"{flag}: cannot listen on {join_host_port(host, port)}"
    if not 0 <= port <= 65535:
        raise ConfigError(f"{flag} must be between 0 and 65535")
    with ExitStack() as on_failure:
        listener = on_failure.enter_context(socket.socket(address_family(host), socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with translate_error(OSError, lambda error: ConfigError(f"{place} ({error.strerror}); set another port")):
            listener.bind((host, port))
            listener.listen()
        on_failure.pop_all()
    return listener


def check_port(host: str, port: int, flag: str) -> None:
    """Raise ConfigError, which names `flag`, if a server cannot listen on this port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            claim_port(port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use; choose another with {flag}") from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}; see {flag}") from None
