"""The end of the server, with an engine that may end at the same time."""

import asyncio

import pytest

from prime_rl.inference.server import abort_requests


class Client:
    """The part of vLLM's client that aborts requests."""

    def __init__(self, error=None):
        self.error, self.asked = error, []

    async def pause_generation(self, **options):
        self.asked.append(options)
        if self.error is None:
            await asyncio.Event().wait()
        raise self.error


@pytest.mark.parametrize("error", [Exception("Server shutting down"), None], ids=["ends too", "hangs"])
async def test_abort_requests_engine_that_ends_or_hangs_does_not_fail_the_server(error, said):
    client = Client(error)
    async with asyncio.timeout(60):
        await abort_requests(client, 0.1)
    assert client.asked == [{"mode": "abort", "clear_cache": False}]
    assert (
        [line for line in said() if "Server shutting down" in line]
        == said()
        == (["could not abort the requests in flight: Server shutting down"] if error else [])
    )
