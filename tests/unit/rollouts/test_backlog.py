"""What lets hundreds of agents run at once: connections wait for a busy event loop, and messages cost little."""

import socket
from types import SimpleNamespace

from aiohttp import web
from pydantic._internal import _typing_extra
from verifiers.v1.trace import MessageNode

from prime_rl.rollouts.separate.interception import lengthen_backlog, speed_up_defaults


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


def test_message_of_a_trace_is_made_without_parsing_the_signature_of_list(monkeypatch):
    seen, read = [], _typing_extra.signature_no_eval
    monkeypatch.setattr(_typing_extra, "signature_no_eval", lambda factory: seen.append(factory) or read(factory))
    speed_up_defaults()
    assert MessageNode.model_construct(parent=None, sampled=True).logprobs == []
    assert seen and list not in seen
