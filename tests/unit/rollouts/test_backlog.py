"""Hundreds of agents start together: their connections wait until a busy event loop accepts them."""

import socket
from types import SimpleNamespace

from aiohttp import web

from prime_rl.rollouts.separate.interception import lengthen_backlog


async def test_connections_wait_for_a_busy_event_loop():
    runner = web.AppRunner(web.Application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = site._server.sockets[0].getsockname()
    try:
        lengthen_backlog(SimpleNamespace(runner=runner))
        connections = [socket.create_connection(address, timeout=0.5) for _ in range(300)]  # the loop accepts none
        for connection in connections:
            connection.close()
    finally:
        await runner.cleanup()
