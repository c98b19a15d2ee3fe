"""An inference server without a model that implements the real contract: lease, staging, weight update, version spans.

`chaos_hook` starts it instead of `inference`, with its configuration:

    python tests/chaos/engine.py inference.toml

It samples by token streams only, with the real server's side of the stream: a client that falls back to HTTP fails. A
version is loaded only if its files match its manifest. Each completion is sampled in two halves with a pause between
them, so that a weight update can fall into it. letters.py defines the answers.
"""

import asyncio
import itertools
import json
import os
import sys
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import chaos_hook  # the module that sitecustomize has installed in this process
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

sys.path.insert(0, str(Path(__file__).parents[2]))

from prime_rl.core.errors import RunError
from prime_rl.inference.generation_stream import StreamedSample, StreamHttpProtocol
from prime_rl.inference.policy.policy_manager import Lease, LeaseHeldError
from prime_rl.inference.request_layer import AccessRules
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.parent_process import die_with_parent
from prime_rl.rollouts.clients.generation_messages import Completion, SampleRequest
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.tensor_hashes import content_hash, hash_tensors
from tests.chaos import letters

LATENCY_SECONDS = 0.02
"""Between the halves of a completion."""


class ContractEngine:
    """The state of the server and its routes; also the `Generator` of its token streams."""

    def __init__(self, lease_seconds: float) -> None:
        self._lease = Lease(lease_seconds)
        self._branch, self._step, self._hash = 0, 0, "base"
        self._numbers = itertools.count()

    def application(self) -> Starlette:
        routes = {
            "/stage_weights": self._stage,
            "/update_weights": self._update,
            "/reload_weights": self._reload,
            "/release_policy": self._release,
        }
        return Starlette(
            routes=[
                Route("/policy", self._policy),
                Route("/health", self._health),
                Route("/metrics", self._health),
                *(Route(path, handler, methods=["POST"]) for path, handler in routes.items()),
            ]
        )

    def _loaded(self) -> dict[str, Any]:
        return {"run_id": self._lease.holder, "branch": self._branch, "step": self._step, "hash": self._hash}

    async def start(self, request: SampleRequest, samples: Sequence[StreamedSample]) -> None:
        """Sample the first half of each completion now, and the second after the pause."""
        loop, prompt = asyncio.get_running_loop(), np.frombuffer(request.token_ids, "<i4").tolist()
        for sample, seed in zip(samples, request.seeds, strict=True):
            if not sample.is_cancelled:
                chaos_hook.reach("call", "server.generate", "before")
                assert seed is not None
                sample.name = f"sample-{next(self._numbers)}"
                loop.call_later(LATENCY_SECONDS, self._finish, sample, prompt, seed, (self._branch, self._step))

    def _finish(self, sample: StreamedSample, prompt: list[int], seed: int, first: tuple[int, int]) -> None:
        if sample.is_cancelled:
            return
        length = letters.completion_length(prompt, seed) + 1
        half = length // 2
        last = self._branch, self._step
        ids = letters.complete(prompt, seed, [first[1]] * half + [last[1]] * (length - half))
        spans = [(f"{first[0]}.{first[1]}", 0, half), (f"{last[0]}.{last[1]}", half, length)]
        logprobs = np.full(length, letters.LOGPROB, "<f4").tobytes()
        chaos_hook.reach("call", "server.generate", "after")
        sample.put(Completion(sample.id, np.array(ids, "<i4").tobytes(), logprobs, spans, "stop"))

    async def abort(self, names: Sequence[str]) -> None:
        """Do nothing: a cancelled sample ends after the pause."""

    def add_load(self, samples: int) -> None:
        """Do nothing: this server has no `/load`."""

    def status_of(self, error: Exception) -> tuple[int, str]:
        """Every exception is a fault of this program."""
        return 500, repr(error)

    async def _policy(self, request: Request) -> Response:
        self._lease.renew(request.query_params.get("run_id"))
        return JSONResponse(self._loaded())

    async def _health(self, _: Request) -> Response:
        return Response()

    async def _stage(self, request: Request) -> Response:
        body = await request.json()
        chaos_hook.reach("call", "server.stage", "before")
        refusal = await self._check(body)
        chaos_hook.reach("call", "server.stage", "after")
        return refusal or JSONResponse({"branch": body["branch"], "step": body["step"]})

    async def _update(self, request: Request) -> Response:
        body = await request.json()
        chaos_hook.reach("call", "server.switch", "before")
        if refusal := await self._check(body):
            return refusal
        manifest = json.loads((Path(body["weight_dir"]) / "manifest.json").read_text())
        self._branch, self._step, self._hash = body["branch"], body["step"], manifest["hash"]
        chaos_hook.reach("call", "server.switch", "after")
        return JSONResponse(self._loaded() | {"stage_s": 0.0, "pause_s": 0.0, "load_s": 0.0})

    async def _check(self, body: dict[str, Any]) -> Response | None:
        """Reject what the real server rejects."""
        try:
            self._lease.take(body["run_id"])
        except LeaseHeldError as error:
            return _held(error)
        if (body["branch"], body["step"]) < (self._branch, self._step):
            return JSONResponse({"error": "older than what is loaded"}, 400)
        directory = Path(body["weight_dir"])
        try:
            manifest = read_manifest(directory, WEIGHTS_FORMAT)
            found = await asyncio.to_thread(lambda: content_hash(hash_tensors(directory)))
        except (RunError, OSError) as error:
            return JSONResponse({"error": str(error)}, 400)
        if (manifest["branch"], manifest["step"], manifest["hash"]) != (body["branch"], body["step"], found):
            return JSONResponse({"error": f"{directory} does not match its manifest"}, 400)
        return None

    async def _reload(self, request: Request) -> Response:
        chaos_hook.reach("call", "server.reset", "before")
        try:
            self._lease.take((await request.json()).get("run_id"))
        except LeaseHeldError as error:
            return _held(error)
        self._branch, self._step, self._hash = 0, 0, "base"
        chaos_hook.reach("call", "server.reset", "after")
        return JSONResponse(self._loaded())

    async def _release(self, request: Request) -> Response:
        try:
            self._lease.release((await request.json())["run_id"])
        except LeaseHeldError as error:
            return _held(error)
        return JSONResponse(self._loaded())


def _held(error: LeaseHeldError) -> Response:
    return JSONResponse({"error": str(error), "free_in_s": error.free_in_seconds}, 409)


def main() -> None:
    die_with_parent()
    config = tomllib.loads(Path(sys.argv[1]).read_text())
    engine = ContractEngine(config["lease_seconds"])
    server = config["server"]
    with HeartbeatWriter(RunPaths(Path(os.environ["CHAOS_RUN"])), "inference", "inference") as heartbeat:
        heartbeat.enter("serve")
        access = AccessRules.for_address("NO_KEY", server["host"])
        http: Any = partial(StreamHttpProtocol, access=access, generator=engine)
        uvicorn.run(
            engine.application(),
            host=server["host"],
            port=server["port"],
            http=http,
            lifespan="off",
            log_level="warning",
            timeout_graceful_shutdown=1,
        )


if __name__ == "__main__":
    main()
