"""A zero-latency inference server with the real HTTP interface, for tests that need a fault or no model.

Every generated token is `token` with log-probability -0.5; versions are those of `/update_weights`. `gate`, if set,
delays each completion; `reply`, if set, returns it.
"""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from prime_rl.storage.artifact import publish_artifact


class FakeEngine:
    def __init__(self):
        self.branch, self.step, self.hash = 0, 0, "base"
        self.holder = None
        self.lease_left = None  # callable() -> remaining seconds of the lease; it ends at 0
        self.full_of_adapters = False  # /reload_weights answers that no adapter is free, and none will be
        self.requests: list[dict] = []
        self.answered = 0  # completions
        self.gate = None  # async callable(request body) -> None
        self.fault = None  # callable(request body) -> web.Response | None
        self.reply = None  # callable(request body) -> (token ids, finish reason), instead of tokens up to max_tokens
        self.url = ""
        self.metrics = ""  # response of GET /metrics
        self.switch: dict = {}  # additional fields in the response of /update_weights
        self.refusal = ""  # error of staging
        self.refused = set[int]()  # refused steps
        self.wrong = ""  # error of the loaded weights
        self.staging = None  # async callable(step), called before staging
        self.switching = None  # async callable(step), called between the switch and the response
        self.deaf: asyncio.Event | None = None  # requests wait until it is set
        self.failures = 0  # number of next switches that return 500
        self.settings: dict = {}  # in the response of /policy
        self.num_policy_requests = 0
        self.base_canary: dict | None = None  # response of GET /base_canary; None: the route does not exist
        self.calls: list[str] = []  # calls of the routes that stage, switch and reset
        self.names = set[str | None]()  # slots in the requests that concern the policy
        self.running: web.AppRunner | None = None

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        if self.fault is not None and (response := self.fault(body)) is not None:
            return response
        first = f"{self.branch}.{self.step}"
        if self.gate is not None:
            await self.gate(body)
        length = body["sampling_params"].get("max_tokens", 4)
        ids, finish = ([20 + i % 5 for i in range(length)], "length") if self.reply is None else self.reply(body)
        ids, finish = (ids, finish) if len(ids) <= length else (ids[:length], "length")
        length = len(ids)
        half = length // 2
        last = f"{self.branch}.{self.step}"
        spans = [{"version": last, "start": 0, "end": length}]
        if first != last and half:
            spans = [{"version": first, "start": 0, "end": half}, {"version": last, "start": half, "end": length}]
        self.answered += 1
        content = [{"token_id": token, "logprob": -0.5} for token in ids]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish}
        return web.json_response({"choices": [choice | {"weight_versions": spans}]})

    def loaded(self) -> dict:
        return {"run_id": self.holder, "branch": self.branch, "step": self.step, "hash": self.hash, "model": "m"}

    async def policy(self, request: web.Request) -> web.Response:
        self.num_policy_requests += 1
        self.names.add(request.query.get("name"))
        return web.json_response(self.loaded() | {"settings": self.settings, "slots": []})

    async def canary(self, _: web.Request) -> web.Response:
        return web.json_response(self.base_canary, status=404 if self.base_canary is None else 200)

    async def stage(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.names.add(body.get("name"))
        self.calls.append(f"stage {body['step']}")
        if self.holder not in (None, body["run_id"]):
            return web.json_response({"error": f"leased by {self.holder}", "free_in_s": 9}, status=409)
        if self.staging is not None:
            await self.staging(body["step"])
        if self.refusal or body["step"] in self.refused:
            return web.json_response({"error": self.refusal or "another hash"}, status=400)
        return web.json_response({"branch": body["branch"], "step": body["step"]})

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.names.add(body.get("name"))
        self.calls.append(f"update {body['step']}")
        if self.failures:
            self.failures -= 1
            return web.json_response({"error": "no memory"}, status=500)
        if self.refusal or body["step"] in self.refused:
            return web.json_response({"error": self.refusal or "another hash"}, status=400)
        manifest = json.loads((Path(body["weight_dir"]) / "manifest.json").read_text())
        if (body["branch"], body["step"]) < (self.branch, self.step):
            return web.json_response({"error": "older than what is loaded"}, status=400)
        self.branch, self.step, self.hash = body["branch"], body["step"], manifest["hash"]
        if self.switching is not None:
            await self.switching(body["step"])
        if self.wrong:
            return web.json_response({"error": self.wrong}, status=422)
        return web.json_response(self.loaded() | {"pause_s": 0.0, "load_s": 0.0} | self.switch)

    async def reload(self, request: web.Request) -> web.Response:
        body = await request.json()
        run_id = body.get("run_id")
        self.names.add(body.get("name"))
        if self.full_of_adapters:
            return web.json_response({"error": "all 2 adapters of this server are in use (one, two)"}, status=409)
        left = self.lease_left() if self.lease_left is not None else 0.1
        if self.holder not in (None, run_id) and left > 0:
            return web.json_response({"error": f"leased by {self.holder}", "free_in_s": left}, status=409)
        self.calls.append("reset")
        self.holder, self.branch, self.step, self.hash = run_id, 0, 0, "base"
        return web.json_response(self.loaded())

    async def release(self, request: web.Request) -> web.Response:
        self.names.add((await request.json()).get("name"))
        self.holder = None
        return web.json_response({})

    async def load(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def start(self, port: int = 0) -> None:
        """Listen as a new server: base model, no lease."""
        self.branch, self.step, self.hash, self.holder = 0, 0, "base", None

        @web.middleware
        async def wait_if_deaf(request: web.Request, handler) -> web.StreamResponse:
            if self.deaf is not None:
                await self.deaf.wait()
            return await handler(request)

        app = web.Application(middlewares=[wait_if_deaf])
        app.add_routes(
            [
                web.post("/inference/v1/generate", self.generate),
                web.get("/policy", self.policy),
                web.get("/base_canary", self.canary),
                web.get("/metrics", self.load),
                web.post("/stage_weights", self.stage),
                web.post("/update_weights", self.update),
                web.post("/reload_weights", self.reload),
                web.post("/release_policy", self.release),
            ]
        )
        self.running = web.AppRunner(app, shutdown_timeout=0.01)  # 0 would wait indefinitely
        await self.running.setup()
        await web.TCPSite(self.running, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self.running.addresses[0][1]}"

    async def die(self) -> None:
        """Close the port and every connection, as if the process died."""
        assert self.running is not None
        await self.running.cleanup()


@asynccontextmanager
async def fake_engine():
    engine = FakeEngine()
    await engine.start()
    try:
        yield engine
    finally:
        await engine.die()


def publish_version(paths, step: int, branch: int = 0, **fields) -> None:
    """Publish an empty policy version, which is enough for a fake engine."""
    manifest = {"format": "prime_rl.weights/1", "branch": branch, "step": step, "tensors": {}, "hash": f"h{step}"}
    publish_artifact(paths.weights(step), lambda _: manifest | fields)


async def play_trainer(
    paths, steps: int, stop: asyncio.Event, delay_seconds: float = 0.0, done: int = 0, branch: int = 0
) -> None:
    """Simulate a trainer: publish version n + 1 as soon as batch n exists, starting at n = `done`."""
    from prime_rl.storage.wait_for import watch_directory

    async for _ in watch_directory(paths.rollouts_dir, stop):
        while done < steps and paths.rollouts(done).exists():
            if delay_seconds:
                await asyncio.sleep(delay_seconds)
            publish_version(paths, done + 1, branch)
            done += 1
        if done == steps:
            stop.set()
