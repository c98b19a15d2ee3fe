"""The HTTP routes of Tinker's API, below /api/v1/."""

import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from prime_rl_tinker import requests
from prime_rl_tinker.checkpoint_store import CheckpointPath, UnknownPathError, iso_time, read_fields
from prime_rl_tinker.samplers import SamplingError
from prime_rl_tinker.service import GoneError, OperationError, Service
from prime_rl_tinker.wire import RequestError

_PREFIX = "/api/v1/"
_POLL_SECONDS = 30.0
"""How long `retrieve_future` waits for a result; the client's limit is 45 s."""
_KEEP_SECONDS = 300
REFUSED = {
    "create_custom_loss": "custom losses run in the client (forward_backward_custom)",
    "join_sampling_session": "sampling sessions are not joined",
    "retrieve_futures": "results are fetched one by one (retrieve_future)",
    "save_weights_external": "weights are in the folder of the server; `tinker-server export` writes a peft adapter",
    "copy_weights": "weights are not copied between servers",
}
"""Routes of the SDK that answer 400, and why."""

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
B = TypeVar("B", bound=BaseModel)


class Routes:
    """The handlers, over a service. An error answers {"detail": reason}."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def posts(self) -> dict[str, Handler]:
        """Return the routes that answer a JSON body at once, or submit an operation, by path."""
        service = self._service
        return {
            # The optional features of the SDK stay off.
            "client/config": _constant(
                pjwt_auth_enabled=False, parallel_fwdbwd_chunks=True, proto_compress_fwdbwd=False
            ),
            "client/dynamic_config": _constant(refresh_interval_sec=_KEEP_SECONDS, sample_cancel_enabled=True),
            "telemetry": _constant(status="accepted"),
            "create_session": _json(requests.CreateSession, self.create_session),
            "session_heartbeat": _json(requests.SessionBody, self.session_heartbeat),
            "create_model": _submit(requests.CreateModelBody, service.create_model),
            "unload_model": _submit(requests.ModelBody, lambda body: service.unload_model(body.model_id)),
            "optim_step": _submit(requests.OptimStepBody, service.optim_step),
            "save_weights": _submit(requests.SaveBody, service.save_weights),
            "save_weights_for_sampler": _submit(requests.SaveForSamplerBody, service.save_for_sampler),
            "load_weights": _submit(requests.LoadBody, service.load_weights),
            "create_sampling_session": _json(requests.CreateSamplingSessionBody, self.create_sampling_session),
            "asample": _json(requests.SampleBody, self.asample),
            "get_info": _json(requests.ModelBody, self.get_info),
            "weights_info": _json(requests.PathBody, self.weights_info),
        }

    def create_session(self, body: requests.CreateSession) -> dict[str, Any]:
        """Add a session."""
        served = self._service.served
        aliases = [f"each model {name} is {served.names[-1]} here" for name in served.names if "*" in name]
        aliases += [f"{alias} is computed as {loss}" for alias, loss in served.losses.items()]
        session_id = self._service.create_session(body)
        return {"type": "create_session", "session_id": session_id, "info_message": "; ".join(aliases) or None}

    def session_heartbeat(self, body: requests.SessionBody) -> dict[str, Any]:
        """Note a sign of life."""
        self._service.touch(body.session_id)
        return {"type": "session_heartbeat"}

    def create_sampling_session(self, body: requests.CreateSamplingSessionBody) -> dict[str, Any]:
        """Add a sampler."""
        name = self._service.create_sampling_session(body)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def asample(self, body: requests.SampleBody) -> dict[str, Any]:
        """Sample completions."""
        request_id, sequences = self._service.sample(body)
        return {"request_id": request_id, "sample_sequence_ids": sequences}

    def get_info(self, body: requests.ModelBody) -> dict[str, Any]:
        """Describe a model."""
        record = self._service.store.model(body.model_id)
        name = record["base_model"]
        data = {"arch": self._service.served.architecture, "model_name": name, "tokenizer_id": name}
        described = {"type": "get_info", "model_id": body.model_id, "model_data": data, "model_name": name}
        kept = {name: record[name] for name in ("lora_rank", "optimizer_config")}
        return described | {"is_lora": True, **kept}

    def weights_info(self, body: requests.PathBody) -> dict[str, Any]:
        """Describe a checkpoint; `folder` is its place on the server's disk."""
        _, folder = self._service.store.find(body.tinker_path)
        fields = read_fields(folder)
        layers = {name: fields[name] for name in ("lora_rank", "train_unembed", "train_mlp", "train_attn")}
        return {"base_model": fields["base_model"], "is_lora": True, **layers, "folder": str(folder)}

    async def forward_backward(self, request: Request) -> Response:
        """Score samples; protobuf."""
        return JSONResponse(_future(*self._service.forward_backward(await request.body())))

    async def retrieve_future(self, request: Request) -> Response:
        """Wait for a result."""
        body = requests.FutureBody.model_validate(await request.json())
        try:
            result = await self._service.result(body.request_id, _POLL_SECONDS)
        except (OperationError, SamplingError) as error:
            is_user_error = 400 <= error.status < 500 if isinstance(error, SamplingError) else error.is_user_error
            return JSONResponse({"error": str(error), "category": "user" if is_user_error else "server"})
        if result is None:
            return JSONResponse({"type": "try_again", "request_id": body.request_id, "queue_state": "active"})
        if isinstance(result, bytes):
            return Response(result, media_type="application/x-protobuf")
        return JSONResponse(result)

    async def capabilities(self, request: Request) -> Response:
        """List the models."""
        served = self._service.served
        common = {"max_context_length": served.max_tokens, "trainable": True, "sampleable": True}
        names = [name for name in served.names if "*" not in name]
        return JSONResponse({"supported_models": [{"model_name": name, **common} for name in names]})

    async def sampler(self, request: Request) -> Response:
        """Describe a sampling session."""
        name = request.path_params["name"]
        sampler = self._service.sampler(name)
        return JSONResponse({"sampler_id": name, "base_model": sampler.base_model, "model_path": sampler.path})

    async def finish_session(self, request: Request) -> Response:
        """End a session."""
        self._service.finish(request.path_params["name"])
        return Response(status_code=204)

    async def cancel_future(self, request: Request) -> Response:
        """End a request for samples."""
        self._service.cancel(requests.FutureBody.model_validate(await request.json()).request_id)
        return Response(status_code=204)

    async def sessions(self, request: Request) -> Response:
        """List the sessions."""
        names, _ = _page(request, self._service.session_ids(), 20)
        return JSONResponse({"sessions": names})

    async def session(self, request: Request) -> Response:
        """Describe a session."""
        session = self._service.session(request.path_params["name"])
        kept = {"user_metadata": session.described.user_metadata, "display_name": session.described.display_name}
        return JSONResponse(
            {"training_run_ids": sorted(session.models), "sampler_ids": sorted(session.samplers), **kept}
        )

    async def training_runs(self, request: Request) -> Response:
        """List the models on disk."""
        names, cursor = _page(request, self._service.store.model_ids(), 20)
        return JSONResponse({"training_runs": [self._run(name) for name in names], "cursor": cursor})

    async def training_run(self, request: Request) -> Response:
        """Describe a model on disk."""
        return JSONResponse(self._run(request.path_params["run"]))

    def _run(self, model_id: str) -> dict[str, Any]:
        record, checkpoints = self._service.store.model(model_id), list(self._service.store.checkpoints(model_id))
        newest = {one["checkpoint_type"]: one for one in checkpoints}
        times = [one["time"] for one in checkpoints]
        return {
            "training_run_id": model_id,
            "base_model": record["base_model"],
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": record["lora_rank"],
            "last_request_time": max([iso_time(record["created_at"]), *times]),
            "last_checkpoint": newest.get("training"),
            "last_sampler_checkpoint": newest.get("sampler"),
            "user_metadata": record["user_metadata"],
        }

    async def run_checkpoints(self, request: Request) -> Response:
        """List the checkpoints of a model."""
        run = request.path_params["run"]
        self._service.store.model(run)
        return JSONResponse({"checkpoints": list(self._service.store.checkpoints(run))})

    async def checkpoints(self, request: Request) -> Response:
        """List all checkpoints."""
        store = self._service.store
        found = [one for name in store.model_ids() for one in store.checkpoints(name)]
        found, cursor = _page(request, sorted(found, key=lambda one: one["time"], reverse=True), 100)
        return JSONResponse({"checkpoints": found, "cursor": cursor})

    async def delete_checkpoint(self, request: Request) -> Response:
        """Delete a checkpoint."""
        self._service.store.delete(self._existing(request))
        return Response(status_code=204)

    async def set_ttl(self, request: Request) -> Response:
        """Set or remove the end of a checkpoint."""
        body = requests.TtlBody.model_validate(await request.json())
        self._service.store.set_expiry(self._existing(request), body.ttl_seconds)
        return Response(status_code=204)

    def _existing(self, request: Request) -> CheckpointPath:
        values = request.path_params
        path, _ = self._service.store.find(f"tinker://{values['run']}/{values['kind']}/{values['name']}")
        return path


def make_app(service: Service, key: str | None) -> Starlette:
    """Make the application; requests need `key` in the header X-API-Key, or without one any that begins with tml-."""
    routes = Routes(service)
    run = "training_runs/{run}"
    checkpoint = run + "/checkpoints/{kind}/{name}"
    no_publish = _refuse("this server has no other users, to whom a checkpoint could be published")
    others: list[tuple[str, str, Handler]] = [
        ("POST", "forward_backward", routes.forward_backward),
        ("POST", "retrieve_future", routes.retrieve_future),
        ("POST", "cancel_future", routes.cancel_future),
        ("GET", "sessions", routes.sessions),
        ("GET", "sessions/{name}", routes.session),
        ("POST", "sessions/{name}/finish", routes.finish_session),
        ("GET", "get_server_capabilities", routes.capabilities),
        ("GET", "samplers/{name}", routes.sampler),
        ("GET", "training_runs", routes.training_runs),
        ("GET", run, routes.training_run),
        ("GET", run + "/checkpoints", routes.run_checkpoints),
        ("GET", "checkpoints", routes.checkpoints),
        ("DELETE", checkpoint, routes.delete_checkpoint),
        ("PUT", checkpoint + "/ttl", routes.set_ttl),
        ("POST", checkpoint + "/publish", no_publish),
        ("DELETE", checkpoint + "/publish", no_publish),
    ]

    def protect(handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            given = request.headers.get("X-API-Key", "")
            if not (given.startswith("tml-") if key is None else secrets.compare_digest(given.encode(), key.encode())):
                return JSONResponse({"detail": "the header X-API-Key has another key than this server"}, 401)
            return await _answer(handler, request)

        return checked

    table = [Route(_PREFIX + path, protect(handler), methods=["POST"]) for path, handler in routes.posts().items()]
    table += [Route(_PREFIX + path, protect(handler), methods=[verb]) for verb, path, handler in others]
    table += [Route(_PREFIX + path, protect(_refuse(reason)), methods=["POST"]) for path, reason in REFUSED.items()]
    table.append(Route(_PREFIX + "healthz", lambda request: JSONResponse({"status": "ok"})))
    return Starlette(routes=table, exception_handlers={HTTPException: _describe})


def _page(request: Request, items: list[Any], size: int) -> tuple[list[Any], dict[str, int]]:
    """Return the items that `limit` and `offset` select, and the SDK's cursor."""
    try:
        limit, offset = (int(request.query_params.get(key, value)) for key, value in (("limit", size), ("offset", 0)))
    except ValueError:
        raise RequestError("limit and offset must be numbers") from None
    if limit < 0 or offset < 0:
        raise RequestError("limit and offset must not be negative")
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def _json(kind: type[B], answer: Callable[[B], dict[str, Any]]) -> Handler:
    """Make a handler that checks the body."""

    async def handle(request: Request) -> Response:
        return JSONResponse(answer(kind.model_validate(await request.json())))

    return handle


def _submit(kind: type[B], submit: Callable[[B], tuple[str, str]]) -> Handler:
    """Make a handler of an operation, which answers the ids of its result and model."""
    return _json(kind, lambda body: _future(*submit(body)))


def _constant(**values: Any) -> Handler:
    async def handle(request: Request) -> Response:
        return JSONResponse(values)

    return handle


def _refuse(reason: str) -> Handler:
    async def handle(request: Request) -> Response:
        raise RequestError(f"not supported: {reason}")

    return handle


async def _answer(handler: Handler, request: Request) -> Response:
    try:
        return await handler(request)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"])) or "body"
        return JSONResponse({"detail": f"{place}: {problem['msg']}"}, 400)
    except (RequestError, UnknownPathError, ValueError) as error:
        return JSONResponse({"detail": str(error)}, 400)
    except GoneError as error:
        return JSONResponse({"detail": str(error)}, 410)


async def _describe(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": f"{request.url.path}: {error.detail}"}, error.status_code)


def _future(request_id: str, model_id: str) -> dict[str, Any]:
    return {"request_id": request_id, "model_id": model_id}
