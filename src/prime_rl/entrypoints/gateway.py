"""`gateway`: hands the rollouts of running environments to agents that run elsewhere, and their rewards back.

    POST /rollouts               {id, base_url, api_key, environment, model, messages, prompt, task, role}; 204: none
    POST /rollouts/ID/reward     {"reward": 1.0, "metrics": {...}}, both optional, ends the rollout
    POST /rollouts/ID/failure    {"message": "..."}: it is not trained on
    *    /rollouts/ID/v1/...     the model, in each API that environments serve
    GET  /rollouts               how many wait and are taken
    POST /offers                 of environments: a rollout; the answer comes when it has ended

A rollout waits in the environment's worker, whose request stays open: if it ends, by its time limit or with the run,
the agent's further requests are answered with 410.
"""

import asyncio
import json
import math
import secrets
import signal
import sys
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from prime_rl.core.api_key import GATEWAY_KEY_VAR, has_key, read_api_key
from prime_rl.core.entry_point import ArgumentParser, command
from prime_rl.core.errors import ConfigError
from prime_rl.core.loopback import bypass_proxies, is_loopback
from prime_rl.core.ports import join_host_port, listen
from prime_rl.rollouts.separate.agent_apis import error_body
from prime_rl.rollouts.separate.values import OWN_METRICS

_PORT = 8700
_BEAT_SECONDS = 10.0
"""Interval of the white space in the answer to an offer, by which both sides notice a lost connection."""
_WAIT_SECONDS = 30.0
_MAX_WAIT_SECONDS = 300.0
_MAX_BODY_BYTES = 256 * 2**20
_BACKLOG = 4096
"""Connections of environments and agents that wait to be accepted; beyond it, the kernel resets them."""
_MAX_NUMBER = 1e300
_MAX_REMEMBERED = 100_000
"""Ended rollouts whose repeated rewards are recognised."""
_NOT_PASSED_ON = {
    *("host", "content-length", "transfer-encoding", "connection", "authorization", "x-api-key", "accept-encoding"),
    "content-encoding",  # the body is decompressed here
    *("cookie", "keep-alive", "upgrade", "proxy-authorization", "expect"),
}
_PASSED_BACK = {"Content-Type", "Retry-After"}


@dataclass(eq=False)
class OpenRollout:
    """A rollout that has not ended.

    Attributes:
        values: what an agent gets of it.
        endpoint: address of its model; `secret` is its key.
        api_key: key for the agent, which is valid for this rollout alone.
        result: what the agent reported.
    """

    values: Mapping[str, Any]
    endpoint: str
    secret: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    api_key: str = field(default_factory=lambda: f"rollout-{secrets.token_urlsafe(24)}")
    is_taken: bool = False
    result: "asyncio.Future[dict[str, Any]]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Gateway:
    """The rollouts between environments and agents."""

    def __init__(self, key: str | None) -> None:
        """Ask environments and agents for `key`; None for none."""
        self._key = key
        self._open: dict[str, OpenRollout] = {}
        self._waiting: deque[OpenRollout] = deque()
        self._changed = asyncio.Condition()
        self._ended: OrderedDict[str, tuple[str, dict[str, Any] | None]] = OrderedDict()  # key of the agent, report
        self._session: ClientSession | None = None

    def make_app(self) -> web.Application:
        """Return the HTTP application."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_refuse_browsers])
        app.cleanup_ctx.append(self._connect)
        app.add_routes(
            [
                web.get("/health", self._answer_health),
                web.post("/offers", self._take_offer),
                web.get("/rollouts", self._count),
                web.post("/rollouts", self._hand_out),
                web.post("/rollouts/{id}/{kind:reward|failure}", self._end),
                web.route("*", "/rollouts/{id}/v1/{path:[a-z0-9_/-]+}", self._call_model),
            ]
        )
        return app

    async def _connect(self, app: web.Application) -> Any:
        self._session = ClientSession(
            timeout=ClientTimeout(total=None, sock_connect=30), connector=TCPConnector(limit=0)
        )
        yield
        await self._session.close()

    async def _answer_health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _take_offer(self, request: web.Request) -> web.StreamResponse:
        """Keep a rollout until it ends, or until its environment disconnects."""
        self._check_key(request)
        body = await _read_json(request)
        rollout = OpenRollout(body["values"], body["endpoint"], body["secret"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b" ")
        self._open[rollout.id] = rollout
        await self._offer(rollout)
        try:
            while not (await asyncio.wait([rollout.result], timeout=_BEAT_SECONDS))[0]:
                await response.write(b" ")
            await response.write(json.dumps(rollout.result.result()).encode())
            await response.write_eof()
        finally:
            del self._open[rollout.id]
            with suppress(ValueError):
                self._waiting.remove(rollout)
            self._ended[rollout.id] = rollout.api_key, rollout.result.result() if rollout.result.done() else None
            if len(self._ended) > _MAX_REMEMBERED:
                self._ended.popitem(last=False)
        return response

    async def _offer(self, rollout: OpenRollout, first: bool = False) -> None:
        rollout.is_taken = False
        (self._waiting.appendleft if first else self._waiting.append)(rollout)
        async with self._changed:
            self._changed.notify_all()

    async def _hand_out(self, request: web.Request) -> web.StreamResponse:
        """Give the oldest waiting rollout to an agent."""
        self._check_key(request)
        try:
            seconds = float(request.query.get("wait_seconds", _WAIT_SECONDS))
        except ValueError:
            seconds = math.nan
        if not seconds >= 0:  # a timer of nan would put those of all others out of order
            raise _error(web.HTTPBadRequest, "wait_seconds is not a number of at least 0")
        try:
            async with asyncio.timeout(min(seconds, _MAX_WAIT_SECONDS)), self._changed:
                await self._changed.wait_for(lambda: self._waiting)
                rollout = self._waiting.popleft()
        except TimeoutError:
            return web.Response(status=204)
        rollout.is_taken = True
        base_url = f"{request.scheme}://{request.host}/rollouts/{rollout.id}/v1"
        body = {"id": rollout.id, "base_url": base_url, "api_key": rollout.api_key, **rollout.values}
        response = web.json_response(body)
        try:
            await response.prepare(request)
            await response.write_eof()
            await asyncio.sleep(0)
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError
        except (ConnectionError, asyncio.CancelledError):  # the agent has gone
            if rollout.id in self._open:
                await asyncio.shield(self._offer(rollout, first=True))
            raise
        return response

    async def _count(self, request: web.Request) -> web.Response:
        self._check_key(request)
        taken = sum(rollout.is_taken for rollout in self._open.values())
        return web.json_response({"waiting": len(self._waiting), "taken": taken})

    async def _end(self, request: web.Request) -> web.Response:
        """Take the reward of a rollout, or its failure. The same report again changes nothing."""
        report = _check_report(request.match_info["kind"], await _read_json(request))
        name = request.match_info["id"]
        if name in self._ended:
            api_key, known = self._ended[name]
            self._check_key(request, api_key)
        else:
            rollout = self._find(request)
            if not rollout.result.done():
                rollout.result.set_result(report)
            known = rollout.result.result()
        if known is None:
            raise self._gone(name)
        if known != report:
            raise _error(web.HTTPConflict, "the rollout has ended with another report")
        return web.json_response({"status": "ok"})

    async def _call_model(self, request: web.Request) -> web.StreamResponse:
        """Pass a request to the model of a rollout, and its answer back as it arrives."""
        rollout = self._find(request)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_PASSED_ON}
        headers["Authorization"] = f"Bearer {rollout.secret}"
        url = f"{rollout.endpoint}/{request.match_info['path']}"
        try:
            body = await request.read()
        except web.RequestPayloadError as error:
            raise _error(web.HTTPBadRequest, f"the body is malformed: {error}") from error
        assert self._session is not None
        response = web.StreamResponse()
        try:
            sent = self._session.request(request.method, url, data=body, headers=headers, params=request.query)
            async with sent as answer:
                response.set_status(answer.status)
                response.headers.update({name: answer.headers[name] for name in _PASSED_BACK & answer.headers.keys()})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
        except ClientError as error:
            if response.prepared:
                if request.transport is not None:
                    request.transport.abort()  # a stream without its end
                return response
            if rollout.id not in self._open:
                raise self._gone(rollout.id) from error
            raise _error(web.HTTPBadGateway, f"the environment does not answer: {error}") from error
        await response.write_eof()
        return response

    def _find(self, request: web.Request) -> OpenRollout:
        """Return the open rollout of a request, whose key is checked."""
        name = request.match_info["id"]
        if (rollout := self._open.get(name)) is not None:
            self._check_key(request, rollout.api_key)
            return rollout
        if name in self._ended:
            raise self._gone(name)
        raise _error(web.HTTPNotFound, f"there is no rollout {name!r}")

    def _gone(self, name: str) -> web.HTTPException:
        is_reported = self._ended[name][1] is not None
        reason = "with its report" if is_reported else "by its time limit, or with its run"
        return _error(web.HTTPGone, f"the rollout has ended: {reason}")

    def _check_key(self, request: web.Request, *others: str) -> None:
        """Raise 401 unless a request has the key of the gateway or one of the `others`."""
        given = request.headers.get("Authorization", "") or f"Bearer {request.headers.get('x-api-key', '')}"
        keys = [key for key in (self._key, *others) if key is not None]
        if keys and not any(has_key(given, key) for key in keys):
            raise _error(web.HTTPUnauthorized, "the key is missing or wrong")


@web.middleware
async def _refuse_browsers(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse pages of other sites, which a browser lets send requests to this machine."""
    if "Origin" in request.headers:
        raise _error(web.HTTPForbidden, "requests of web pages are refused")
    return await handler(request)


async def _read_json(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except (ValueError, RecursionError, web.RequestPayloadError) as error:
        raise _error(web.HTTPBadRequest, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _error(web.HTTPBadRequest, "the body is not a JSON object")
    return body


def _check_report(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an environment gets: `failure`, or the numbers `reward` and metrics, without null."""
    if kind == "failure":
        return {"failure": str(body.get("message") or "the agent reported a failure")}
    metrics = body.get("metrics") or {}
    if unknown := body.keys() - {"reward", "metrics"}:
        raise _error(web.HTTPBadRequest, f"unknown key {min(unknown)!r}; the keys are reward and metrics")
    if not isinstance(metrics, dict) or metrics.keys() & {"reward", *OWN_METRICS}:
        names = ", ".join(("reward", *OWN_METRICS))
        raise _error(web.HTTPBadRequest, f"metrics is not an object of numbers, without {names}")
    numbers = {**metrics, "reward": body.get("reward")}
    for name, value in numbers.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_NUMBER
        if not is_number and not (name == "reward" and value is None):
            raise _error(web.HTTPBadRequest, f"{name} is not a finite number")
    return {"numbers": {name: value for name, value in numbers.items() if value is not None}}


def _error(kind: type[web.HTTPException], message: str) -> web.HTTPException:
    return kind(text=json.dumps(error_body(kind.status_code, message)), content_type="application/json")


@command
def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    text = "Hand the rollouts of running environments (env.gateway) to agents that run elsewhere; see docs/agents.md."
    parser = ArgumentParser(prog="gateway", description=text)
    parser.add_argument("--port", type=int, default=_PORT, help=f"port (default {_PORT}; 0: any)")
    parser.add_argument("--host", default="127.0.0.1", help="address (default 127.0.0.1); another one needs a key")
    text = f"environment variable of the key of environments and agents (default {GATEWAY_KEY_VAR})"
    parser.add_argument("--api-key-var", default=GATEWAY_KEY_VAR, help=text)
    arguments = parser.parse_args(sys.argv[1:])
    key = read_api_key(arguments.api_key_var)
    if key is None and not is_loopback(arguments.host):
        raise ConfigError(f"--host {arguments.host} needs a key in {arguments.api_key_var}")
    bypass_proxies()
    asyncio.run(_serve(arguments.host, arguments.port, key))


async def _serve(host: str, port: int, key: str | None) -> None:
    end = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end.set)
    app = Gateway(key).make_app()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    with listen(host, port, f"--port {port}") as listener:
        await runner.setup()
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        print(f"gateway: http://{join_host_port(host, listener.getsockname()[1])}", flush=True)
        await end.wait()
        await runner.cleanup()


if __name__ == "__main__":
    main()
