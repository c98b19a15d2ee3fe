"""The routes that switch the policy, in addition to vLLM's routes on the same server."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import JSONResponse
from loguru import logger
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prime_rl.core.errors import summarize_exception
from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.named_adapters import NamedAdapters
from prime_rl.inference.policy.policy_manager import LeaseHeldError, WrongWeightsError
from prime_rl.inference.policy.slots import Slots
from prime_rl.inference.policy.weight_checks import WeightsRefusedError
from prime_rl.liveness.run_settings import RunSettings
from prime_rl.rollouts.clients.generation_messages import PATH, PROTOCOL
from prime_rl.storage.weights.canary import PolicyCanary

_STATUS: dict[type[Exception], int] = {WeightsRefusedError: 400, LeaseHeldError: 409, WrongWeightsError: 422}

_B = TypeVar("_B", bound="_Body")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _VersionBody(_Body):
    weight_dir: Path
    branch: int = Field(0, ge=0)
    step: int = Field(ge=0)

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.branch, self.step)


class UpdateBody(_VersionBody):
    """Body of POST /update_weights and /stage_weights."""

    run_id: str | None = None
    name: str | None = None


class ReloadBody(_Body):
    """Body of POST /reload_weights."""

    run_id: str | None = None
    name: str | None = None


class LoadAdapterBody(_VersionBody):
    """Body of POST /load_adapter."""

    name: str


class UnloadAdapterBody(_Body):
    """Body of POST /unload_adapter."""

    name: str


class PinBody(_Body):
    """Body of POST /pin_policy."""

    name: str | None = None


class UnpinBody(_Body):
    """Body of POST /unpin_policy."""

    pin: str


class ReleaseBody(_Body):
    """Body of POST /release_policy."""

    run_id: str
    name: str | None = None


def make_router(
    slots: Slots,
    model_name: str,
    admin_refusal: str | None = None,
    adapters: NamedAdapters | None = None,
    base_canary: PolicyCanary | None = None,
    canary_tolerance: float | None = None,
    settings: RunSettings = MappingProxyType({}),
) -> APIRouter:
    """Make the routes.

    An error answers {"error": reason}: 400 for invalid weights or an invalid body, 403 if admin requests are disabled,
    409 if other runs hold the slot or all slots, 415 for a body that is not JSON, 422 for loaded weights that are not
    the trainer's, 500 for any other error. `RequestLayer` checks the key before.

    `admin_refusal` is why admin requests are disabled; None if they are enabled. A server that takes no adapters has no
    `adapters`. `base_canary` has the log-probabilities of the base model at the start of the server. `settings` are
    what the settings of a run must fit.
    """
    router = APIRouter(dependencies=[Depends(_admin_check(admin_refusal))])

    @router.get("/policy")
    async def policy(run_id: str | None = None, name: str | None = None) -> dict[str, Any]:
        """The loaded version (`branch`, `step`, `hash`), `model`, the lease's holder (`run_id`), `canary_difference`,
        the `settings` that a run must fit and, with `enable_lora`, `adapters`; of the slot `?name=`, or of the base
        slot, then also of all `slots`, and their maximum number `max_slots`. The query `?run_id=` renews that run's
        lease."""
        described = {**slots.describe(name, run_id), "model": model_name, "settings": dict(settings)}
        return described if adapters is None else described | {"adapters": adapters.describe()}

    @router.get(PATH)
    async def stream() -> JSONResponse:
        """Open a token stream: many requests on one connection, tokens in and tokens out with their versions. Needs the
        header `Upgrade: prime-rl-generation-1`, else 426."""
        return JSONResponse({"error": f"this route needs the header Upgrade: {PROTOCOL}"}, 426, {"Upgrade": PROTOCOL})

    if base_canary is not None:

        @router.get("/base_canary")
        async def get_base_canary() -> dict[str, Any]:
            """The base model's log-probabilities of the canary: `token_ids`, `logprobs`, `dtype`, `tolerance`."""
            fields = asdict(base_canary)
            del fields["base_logprobs"]  # of a trainer
            return {**fields, "tolerance": canary_tolerance}

    @router.post("/measure_switch")
    async def measure_switch() -> JSONResponse:
        """Pause sampling and measure the lower limit of a weight update: `bytes`, `copy_s`, `process_s`."""
        answer = await slots.base.measure()
        return JSONResponse(answer, 400 if "error" in answer else 200)

    _add_version_routes(router, slots)
    if adapters is not None:
        _add_adapter_routes(router, adapters)
    return router


def _add_version_routes(router: APIRouter, slots: Slots) -> None:
    """Add the routes with a body: weight updates, the lease and pins of a slot (`name`; by default the base slot)."""

    async def pin(body: PinBody) -> dict[str, Any]:
        """Delay weight updates until the returned `pin` is released, at most `pin_timeout_seconds`; requests send it as
        header `X-Policy-Pin`."""
        return await slots.pin(body.name)

    async def unpin(body: UnpinBody) -> dict[str, Any]:
        """Release a pin. Answers `{}`."""
        slots.unpin(body.pin)
        return {}

    async def release(body: ReleaseBody) -> dict[str, Any]:
        """Release the lease and free a run's slot. Answers as `GET /policy`."""
        return await slots.release(body.name, body.run_id)

    async def stage(body: UpdateBody) -> dict[str, Any]:
        """Read, check and stage a version without switching to it: `branch`, `step`, `hash`, `stage_s`, `bytes`."""
        slot = await slots.open(body.name, body.run_id)
        return await slot.stage(body.version, body.weight_dir, body.run_id)

    async def update(body: UpdateBody) -> dict[str, Any]:
        """Switch to a version and keep the requests in flight: `branch`, `step`, `hash`, `stage_s`, `pause_s`,
        `load_s`, `bytes`, `canary_difference`."""
        slot = await slots.open(body.name, body.run_id)
        return await slot.update(body.version, body.weight_dir, body.run_id)

    async def reload(body: ReloadBody) -> dict[str, Any]:
        """Return to the base model, version 0.0, and end the slot's requests; the first call with a `name` makes its
        slot. Answers as `/update_weights`."""
        return await (await slots.open(body.name, body.run_id)).reload(body.run_id)

    _add(router, "/stage_weights", UpdateBody, stage)
    _add(router, "/update_weights", UpdateBody, update)
    _add(router, "/reload_weights", ReloadBody, reload)
    _add(router, "/release_policy", ReleaseBody, release)
    _add(router, "/pin_policy", PinBody, pin)
    _add(router, "/unpin_policy", UnpinBody, unpin)


def _add_adapter_routes(router: APIRouter, adapters: NamedAdapters) -> None:
    """Add the routes of named adapters, which belong to no run and need no lease."""

    async def load(body: LoadAdapterBody) -> dict[str, Any]:
        """Serve a published adapter under `name`. Answers its entry in `adapters` of `GET /policy`. `enable_lora`
        only."""
        return await adapters.load(body.name, body.version, body.weight_dir)

    async def unload(body: UnloadAdapterBody) -> dict[str, Any]:
        """Stop serving an adapter. Answers the removed entry. `enable_lora` only."""
        return await adapters.unload(body.name)

    _add(router, "/load_adapter", LoadAdapterBody, load)
    _add(router, "/unload_adapter", UnloadAdapterBody, unload)


def _add(router: APIRouter, path: str, body_type: type[_B], call: Callable[[_B], Awaitable[dict[str, Any]]]) -> None:
    """Add a POST route that parses its body and answers errors as `make_router` describes."""

    async def handle(request: Request) -> JSONResponse:
        try:
            return JSONResponse(await call(body_type.model_validate_json(await request.body() or b"{}")))
        except Exception as error:  # noqa: BLE001  the client gets the reason
            return _answer_error(error)

    schema = {"content": {"application/json": {"schema": body_type.model_json_schema()}}}
    description = inspect.cleandoc(call.__doc__ or "")
    router.add_api_route(path, handle, methods=["POST"], description=description, openapi_extra={"requestBody": schema})


def _answer_error(error: Exception) -> JSONResponse:
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        return JSONResponse({"error": f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}"}, 400)
    if status := _STATUS.get(type(error)):
        seconds = error.free_in_seconds if isinstance(error, LeaseHeldError) else None
        return JSONResponse({"error": str(error), **({} if seconds is None else {"free_in_s": seconds})}, status)
    logger.opt(exception=error).error("an admin request failed")
    return JSONResponse({"error": summarize_exception(error, full=True)}, 500)


def _admin_check(refusal: str | None) -> Callable[[Request], None]:
    def check(request: Request) -> None:
        if request.method == "GET":
            return
        if refusal is not None:
            raise HTTPException(403, refusal)
        # A page in a browser on this machine may send other content types to any address without a preflight.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "this route needs the header Content-Type: application/json")

    return check
