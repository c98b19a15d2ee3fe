"""The routes that switch the policy, beside vLLM's own on the same server."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prime_rl.inference.lease import LeaseHeldError
from prime_rl.inference.named_adapters import NamedAdapters
from prime_rl.inference.policy import PolicyServer, PolicyWrongError
from prime_rl.inference.weights import WeightsRefusedError
from prime_rl.types import PolicyVersion


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class UpdateBody(_Body):
    """Body of POST /update_weights and /stage_weights."""

    weight_dir: Path
    branch: int = Field(0, ge=0)
    step: int = Field(ge=0)
    run_id: str | None = None


class ReloadBody(_Body):
    """Body of POST /reload_weights."""

    run_id: str | None = None


class LoadAdapterBody(_Body):
    """Body of POST /load_adapter."""

    name: str
    weight_dir: Path
    branch: int = Field(0, ge=0)
    step: int = Field(ge=0)


class UnloadAdapterBody(_Body):
    """Body of POST /unload_adapter."""

    name: str


class PinBody(_Body):
    """Body of POST /unpin_policy."""

    pin: str


class ReleaseBody(_Body):
    """Body of POST /release_policy."""

    run_id: str


def make_router(
    server: PolicyServer,
    model_name: str,
    why_not: str | None = None,
    measure: Callable[[], Awaitable[dict[str, Any]]] | None = None,
    adapters: NamedAdapters | None = None,
) -> APIRouter:
    """Make the routes.

    A refusal answers {"error": why}: 400 for bad weights or a bad body, 403 where nobody may steer, 409 if another run
    holds the server, 422 for weights that were loaded and are not the trainer's. The key is asked before (`access`).

    Args:
        server: what they steer.
        model_name: the name under which the model is served.
        why_not: why nobody may change anything; None if whoever gets here may.
        measure: times what a switch costs at the least; benchmarks compare with it.
        adapters: those beside the policy; None where the server takes none.
    """
    router = APIRouter(dependencies=[Depends(_steering_check(why_not))])

    @router.get("/policy")
    async def policy(run_id: str | None = None) -> dict[str, Any]:
        described = {**server.describe(run_id), "model": model_name}
        return described if adapters is None else described | {"adapters": adapters.describe()}

    @router.post("/stage_weights")
    async def stage_weights(request: Request) -> JSONResponse:
        async def call() -> dict[str, Any]:
            body = UpdateBody.model_validate_json(await request.body())
            return await server.stage(PolicyVersion(body.branch, body.step), body.weight_dir, body.run_id)

        return await _answer(call)

    @router.post("/update_weights")
    async def update_weights(request: Request) -> JSONResponse:
        async def call() -> dict[str, Any]:
            body = UpdateBody.model_validate_json(await request.body())
            return await server.update(PolicyVersion(body.branch, body.step), body.weight_dir, body.run_id)

        return await _answer(call)

    @router.post("/reload_weights")
    async def reload_weights(request: Request) -> JSONResponse:
        async def call() -> dict[str, Any]:
            body = ReloadBody.model_validate_json(await request.body() or b"{}")
            return await server.reload(body.run_id)

        return await _answer(call)

    @router.post("/release_policy")
    async def release_policy(request: Request) -> JSONResponse:
        async def call() -> dict[str, Any]:
            return server.release(ReleaseBody.model_validate_json(await request.body()).run_id)

        return await _answer(call)

    @router.post("/pin_policy")
    async def pin_policy() -> dict[str, Any]:
        return {"pin": await server.pins.take(), **server.describe()}

    @router.post("/unpin_policy")
    async def unpin_policy(request: Request) -> JSONResponse:
        async def call() -> dict[str, Any]:
            server.pins.give_back(PinBody.model_validate_json(await request.body()).pin)
            return {}

        return await _answer(call)

    if adapters is not None:
        _add_adapter_routes(router, adapters)
    if measure is not None:

        @router.post("/measure_switch")
        async def measure_switch() -> JSONResponse:
            answer = await measure()
            return JSONResponse(answer, 400 if "error" in answer else 200)

    return router


def _add_adapter_routes(router: APIRouter, adapters: NamedAdapters) -> None:
    """Adapters beside the policy are nobody's: no lease is needed."""

    @router.post("/load_adapter")
    async def load_adapter(request: Request) -> JSONResponse:
        async def call() -> dict[str, Any]:
            body = LoadAdapterBody.model_validate_json(await request.body())
            return await adapters.load(body.name, PolicyVersion(body.branch, body.step), body.weight_dir)

        return await _answer(call)

    @router.post("/unload_adapter")
    async def unload_adapter(request: Request) -> JSONResponse:
        async def call() -> dict[str, Any]:
            return await adapters.unload(UnloadAdapterBody.model_validate_json(await request.body()).name)

        return await _answer(call)


async def _answer(call: Callable[[], Awaitable[dict[str, Any]]]) -> JSONResponse:
    try:
        return JSONResponse(await call())
    except ValidationError as error:
        problem = error.errors()[0]
        return JSONResponse({"error": f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}"}, 400)
    except WeightsRefusedError as error:
        return JSONResponse({"error": str(error)}, 400)
    except LeaseHeldError as error:
        return JSONResponse({"error": str(error), "free_in_s": error.free_in_s}, 409)
    except PolicyWrongError as error:
        return JSONResponse({"error": str(error)}, 422)


def _steering_check(why_not: str | None) -> Callable[[Request], None]:
    def check(request: Request) -> None:
        if why_not is not None and request.method != "GET":
            raise HTTPException(403, why_not)

    return check
