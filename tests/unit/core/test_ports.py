"""Addresses of both families."""

import socket

import pytest

from prime_rl.core.ports import address_family, join_host_port


@pytest.mark.parametrize(
    ("host", "joined"), [("node1", "node1:80"), ("10.0.0.1", "10.0.0.1:80"), ("::1", "[::1]:80"), ("::", "[::]:80")]
)
def test_join_host_port_puts_ipv6_addresses_in_brackets(host, joined):
    assert join_host_port(host, 80) == joined


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_address_family_of_a_host_can_bind_to_it(host):
    with socket.create_server((host, 0), family=address_family(host)) as listener:
        assert listener.getsockname()[1]
