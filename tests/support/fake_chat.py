"""A small server with OpenAI's chat completions only, for tests of the chat path."""

import json
from contextlib import asynccontextmanager

from aiohttp import web


def says(content, finish="stop", **fields):
    """Return a choice with text."""
    return {"index": 0, "message": {"role": "assistant", "content": content, **fields}, "finish_reason": finish}


def calls(name, call_id="call_abc", content=None, **arguments):
    """Return a choice that calls one tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return says(content, "tool_calls", tool_calls=[{"id": call_id, "type": "function", "function": function}])


class FakeChat:
    """Answers each request with `fault` if it returns a response, else with `reply`."""

    def __init__(self):
        self.requests: list[dict] = []
        self.keys: list[str | None] = []
        self.reply = lambda body: says("42")
        self.fault = None  # callable(request body) -> web.Response | None
        self.pins: list[str] | None = None  # current pins; None: the server has no pins
        self.lacks_slot = False
        self.named: list[str | None] = []  # pins of the requests
        self.asked_for_pins = 0
        self.models: list[str] = []
        self.url = ""
        self.running: web.AppRunner | None = None

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.named.append(request.headers.get("X-Policy-Pin"))
        if self.fault is not None and (response := self.fault(body)) is not None:
            return response
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "choices": [self.reply(body)], "usage": usage}
        )

    async def pin(self, _: web.Request) -> web.Response:
        self.asked_for_pins += 1
        if self.pins is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        if self.lacks_slot:
            return web.json_response({"error": "name: there is no slot 'm'"}, status=400)
        self.pins.append(f"pin {self.asked_for_pins - 1}")
        return web.json_response({"pin": self.pins[-1], "branch": 0, "step": 3})

    async def unpin(self, request: web.Request) -> web.Response:
        assert self.pins is not None
        self.pins.remove((await request.json())["pin"])
        return web.json_response({})

    async def list_models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def start(self, prefix: str = "/v1") -> None:
        app = web.Application()
        app.add_routes([web.post(f"{prefix}/chat/completions", self.complete)])
        app.add_routes([web.get(f"{prefix}/models", self.list_models)])
        app.add_routes([web.post("/pin_policy", self.pin), web.post("/unpin_policy", self.unpin)])
        self.running = web.AppRunner(app, shutdown_timeout=0.01)
        await self.running.setup()
        await web.TCPSite(self.running, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.running.addresses[0][1]}"

    async def die(self) -> None:
        assert self.running is not None
        await self.running.cleanup()


@asynccontextmanager
async def fake_chat(prefix: str = "/v1"):
    server = FakeChat()
    await server.start(prefix)
    try:
        yield server
    finally:
        await server.die()
