"""A port belongs to one server from the moment it is asked for, though it serves much later.

SO_REUSEADDR, without which the connections of a server that has just ended would keep its port for a minute, lets two
sockets bind one port as long as neither listens. A server listens only once its model is loaded; until then a name in
the kernel's table of Unix sockets stands for the port. It is freed with the process, however that ends.
"""

import socket


def claim_port(port: int) -> socket.socket:
    """Claim `port` among this project's servers on this machine, until what is returned is closed.

    Raises:
        OSError: EADDRINUSE, another process has it.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0prime_rl.port/{port}")
    except OSError:
        claim.close()
        raise
    return claim
