"""The OpenAI-compatible endpoint of a worker, for environments that build a client of their own.

client = state["client"].client                                   answered in this process, no port is opened
AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)     answered here, also from a subprocess
"""

import asyncio
import secrets
import socket
from contextvars import Context
from typing import Any

from aiohttp import web

from prime_rl.rollouts.clients.raw_openai_client import Answer, error_body, respond

_MAX_BODY_BYTES = 64 * 2**20


class PolicyEndpoint:
    """Serves chat completions on 127.0.0.1. Each rollout has a secret key, which is valid until the rollout ends."""

    def __init__(self) -> None:
        """Open no port before the first rollout asks for `base_url`."""
        self._answers: dict[str, Answer] = {}
        self._requests: dict[str, set[asyncio.Task[Any]]] = {}
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        """Address for clients. Needs the running event loop."""
        if self._socket is None:
            # It accepts connections from now on; they wait until the server runs.
            self._socket = socket.create_server(("127.0.0.1", 0))
            # A new context: the server is for all groups, not only for the one that starts it.
            self._task = asyncio.get_running_loop().create_task(self._serve(self._socket), context=Context())
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"

    def add(self, answer: Answer) -> str:
        """Return a new key, whose requests get `answer`."""
        key = secrets.token_urlsafe(24)
        self._answers[key] = answer
        return key

    def remove(self, key: str) -> None:
        """End the requests with the key, so that the server stops sampling, and refuse further ones."""
        self._answers.pop(key, None)
        for task in self._requests.pop(key, ()):
            task.cancel()

    async def _serve(self, listening: socket.socket) -> None:
        application = web.Application(client_max_size=_MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._handle)
        # A client that disconnects cancels its request, so that the server stops sampling.
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
        await runner.setup()
        try:
            await web.SockSite(runner, listening).start()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if (answer := self._answers.get(key)) is None:
            refusal = "the key is not that of a running rollout; use the api_key of state['client'].client"
            return web.json_response(error_body(refusal), status=401)
        task = asyncio.current_task()
        assert task is not None
        requests = self._requests.setdefault(key, set())
        requests.add(task)
        try:
            status, body = await respond(answer, request.path, await request.read())
        finally:
            requests.discard(task)
        return web.json_response(body, status=status)
