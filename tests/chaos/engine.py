"""An inference server without a model over the real contract: lease, stage, switch, spans of versions, heartbeat.

It takes the place of `inference` in a process of its own (`chaos_hook`), with that one's configuration:

    python tests/chaos/engine.py inference.toml

A version is loaded only if its files are what its manifest says. Each completion is sampled in two halves with some
time in between, so that a switch may fall into it. What it answers: letters.py.
"""

import asyncio
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import chaos_hook  # the one that sitecustomize has installed in this process
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[2]))

from prime_rl.errors import RunError
from prime_rl.inference.lease import Lease, LeaseHeldError
from prime_rl.run.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.run.heart import Heartbeat
from prime_rl.run.paths import RunPaths
from prime_rl.run.tensors import content_hash, hash_tensors
from prime_rl.supervisor.process import follow_parent
from tests.chaos import letters

LATENCY_S = 0.02
"""Between the halves of a completion."""


class ContractEngine:
    """The state of the server and its routes."""

    def __init__(self, lease_s: float) -> None:
        self._lease = Lease(lease_s)
        self._branch, self._step, self._hash = 0, 0, "base"

    def application(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.get("/policy", self._policy),
                web.get("/health", self._health),
                web.get("/metrics", self._health),
                web.post("/stage_weights", self._stage),
                web.post("/update_weights", self._update),
                web.post("/reload_weights", self._reload),
                web.post("/release_policy", self._release),
            ]
        )
        return app

    def _loaded(self) -> dict[str, Any]:
        return {"run_id": self._lease.holder, "branch": self._branch, "step": self._step, "hash": self._hash}

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        chaos_hook.reach("call", "server.generate", "before")
        prompt, seed = body["token_ids"], body["sampling_params"]["seed"]
        length = letters.completion_length(prompt, seed) + 1
        half = length // 2
        first = self._branch, self._step
        await asyncio.sleep(LATENCY_S)
        last = self._branch, self._step
        versions = [first[1]] * half + [last[1]] * (length - half)
        ids = letters.complete(prompt, seed, versions)
        spans = [
            {"version": f"{first[0]}.{first[1]}", "start": 0, "end": half},
            {"version": f"{last[0]}.{last[1]}", "start": half, "end": length},
        ]
        content = [{"token_id": token, "logprob": letters.LOGPROB} for token in ids]
        choice = {"index": 0, "finish_reason": "stop", "token_ids": ids, "logprobs": {"content": content}}
        chaos_hook.reach("call", "server.generate", "after")
        return web.json_response({"choices": [choice | {"weight_versions": spans}]})

    async def _policy(self, request: web.Request) -> web.Response:
        self._lease.renew(request.query.get("run_id"))
        return web.json_response(self._loaded())

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="")

    async def _stage(self, request: web.Request) -> web.Response:
        body = await request.json()
        chaos_hook.reach("call", "server.stage", "before")
        refusal = await self._check(body)
        chaos_hook.reach("call", "server.stage", "after")
        return refusal or web.json_response({"branch": body["branch"], "step": body["step"]})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        chaos_hook.reach("call", "server.switch", "before")
        if refusal := await self._check(body):
            return refusal
        manifest = json.loads((Path(body["weight_dir"]) / "manifest.json").read_text())
        self._branch, self._step, self._hash = body["branch"], body["step"], manifest["hash"]
        chaos_hook.reach("call", "server.switch", "after")
        return web.json_response(self._loaded() | {"stage_s": 0.0, "pause_s": 0.0, "load_s": 0.0})

    async def _check(self, body: dict[str, Any]) -> web.Response | None:
        """Refuse what the real server refuses."""
        try:
            self._lease.take(body["run_id"])
        except LeaseHeldError as error:
            return _held(error)
        if (body["branch"], body["step"]) < (self._branch, self._step):
            return web.json_response({"error": "older than what is loaded"}, status=400)
        directory = Path(body["weight_dir"])
        try:
            manifest = read_manifest(directory, WEIGHTS_FORMAT)
            found = await asyncio.to_thread(lambda: content_hash(hash_tensors(directory)))
        except (RunError, OSError) as error:
            return web.json_response({"error": str(error)}, status=400)
        if (manifest["branch"], manifest["step"], manifest["hash"]) != (body["branch"], body["step"], found):
            return web.json_response({"error": f"{directory} is not what its manifest says"}, status=400)
        return None

    async def _reload(self, request: web.Request) -> web.Response:
        chaos_hook.reach("call", "server.reset", "before")
        try:
            self._lease.take((await request.json()).get("run_id"))
        except LeaseHeldError as error:
            return _held(error)
        self._branch, self._step, self._hash = 0, 0, "base"
        chaos_hook.reach("call", "server.reset", "after")
        return web.json_response(self._loaded())

    async def _release(self, request: web.Request) -> web.Response:
        try:
            self._lease.release((await request.json())["run_id"])
        except LeaseHeldError as error:
            return _held(error)
        return web.json_response(self._loaded())


def _held(error: LeaseHeldError) -> web.Response:
    return web.json_response({"error": str(error), "free_in_s": error.free_in_s}, status=409)


def main() -> None:
    follow_parent()
    config = tomllib.loads(Path(sys.argv[1]).read_text())
    engine = ContractEngine(config["lease_seconds"])
    server = config["server"]
    with Heartbeat(RunPaths(Path(os.environ["CHAOS_RUN"])), "inference", "inference") as heartbeat:
        heartbeat.enter("serve")
        web.run_app(engine.application(), host=server["host"], port=server["port"], print=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
