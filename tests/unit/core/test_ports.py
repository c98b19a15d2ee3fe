"""Addresses of both families."""

import socket

import pytest

from prime_rl.core.errors import ConfigError
from prime_rl.core.ports import address_family, join_host_port, listen


@pytest.mark.parametrize(
    ("host", "joined"), [("localhost", "localhost:80"), ("127.0.0.1", "127.0.0.1:80"), ("::1", "[::1]:80")]
)
def test_address_of_either_family_can_be_bound_and_joined_to_a_port(host, joined):
    assert join_host_port(host, 80) == joined
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
