"""A server before an inference server: passes everything on, and remembers what was asked for and answered when."""

import time
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from aiohttp import web

_GENERATE = "/inference/v1/generate"


class RecordingProxy:
    """Stands before one server.

    Attributes:
        url: where it listens.
        choices: for each answered completion the prompt's ids and the choice, as the engine wrote it.
        calls: (path, when it came, when it was answered) of all other requests, `time.monotonic`.
    """

    def __init__(self, target: str) -> None:
        self.url = ""
        self.choices: list[tuple[list[int], dict]] = []
        self.calls: list[tuple[str, float, float]] = []
        self._target = target
        self._session: aiohttp.ClientSession | None = None

    async def handle(self, request: web.Request) -> web.Response:
        assert self._session is not None
        body, came = await request.read(), time.monotonic()
        headers = {"Content-Type": "application/json"} if body else {}
        url = self._target + request.path_qs
        async with self._session.request(request.method, url, data=body or None, headers=headers) as response:
            answer = await response.read()
        if request.path == _GENERATE and response.status == 200:
            self.choices.append((msgspec.json.decode(body)["token_ids"], msgspec.json.decode(answer)["choices"][0]))
        else:
            self.calls.append((request.path, came, time.monotonic()))
        return web.Response(body=answer, status=response.status, content_type=response.content_type)


@asynccontextmanager
async def recording_proxy(target: str):
    """Start a proxy of the server at `target`."""
    proxy = RecordingProxy(target)
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        proxy._session = session
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield proxy
        finally:
            await runner.cleanup()
