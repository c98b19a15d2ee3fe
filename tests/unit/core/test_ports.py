"""Addresses of both families."""

import socket

import pytest

from prime_rl.core.errors import ConfigError
from prime_rl.core.ports import address_family, join_host_port, listen


@pytest.mark.parametrize(
    ("host", "joined"), [("node1", "node1:80"), ("10.0.0.1", "10.0.0.1:80"), ("::1", "[::1]:80"), ("::", "[::]:80")]
)
def test_join_host_port_puts_ipv6_addresses_in_brackets(host, joined):
    assert join_host_port(host, 80) == joined


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_address_family_of_a_host_can_bind_to_it(host):
    with socket.create_server((host, 0), family=address_family(host)) as listener:
        assert listener.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_listen_on_a_port_in_use_names_the_address_and_the_flag(host):
    with listen(host, 0, "--port 0") as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            listen(host, port, f"--port {port}")
    place = join_host_port(host, port)
    assert str(caught.value) == f"--port {port}: cannot listen on {place} (Address already in use); set another port"
