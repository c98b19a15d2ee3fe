"""The web application of `page`: static files, JSON of the runs, one event stream per browser tab, /metrics."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import resources
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from prime_rl.page.page_access import AccessLayer, PageAccess
from prime_rl.page.prometheus_export import prometheus_text
from prime_rl.page.run_data.run_view import RunView
from prime_rl.page.run_data.sample_index import SampleFilter
from prime_rl.page.run_data.timeline_spans import chrome_trace

STREAM_INTERVAL_SECONDS = 1.0
_HEALTH_INTERVAL_SECONDS = 5.0
_PING_TICKS = 15
_CLOSING_CHECK_SECONDS = 0.1
_MAX_POINTS = 4000
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml", ".LICENSE": "text/plain; charset=utf-8",
}  # fmt: skip


class SampleQuery(SampleFilter):
    """Query parameters of a search for rollouts."""

    evaluation: str | None = None
    position: int = Field(0, ge=0)
    count: int = Field(50, ge=1, le=200)


def make_app(
    runs: Sequence[RunView],
    access: PageAccess,
    interval_seconds: float = STREAM_INTERVAL_SECONDS,
    is_closing: Callable[[], bool] = lambda: False,
) -> Any:
    """The ASGI application, which checks the access of each request. Its streams end when `is_closing` returns true."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    by_name = {run.name: run for run in runs}

    def find(name: str) -> RunView:
        if name not in by_name:
            raise HTTPException(404, "no such run")
        return by_name[name]

    _add_static(app)
    _add_queries(app, by_name, find)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(prometheus_text(runs), media_type=CONTENT_TYPE_LATEST)

    @app.get("/api/runs/{name}/stream")
    async def stream(name: str, request: Request, cursor: str = "") -> StreamingResponse:
        begin = request.headers.get("last-event-id") or cursor
        events = run_events(find(name), begin, interval_seconds, is_closing)
        return StreamingResponse(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    @app.get("/api/runs/{name}/health")
    async def health(name: str) -> dict[str, Any]:
        run = find(name)
        examination = run.health.start()
        while examination.is_alive():
            if is_closing():
                raise HTTPException(503, "the page ends")
            await asyncio.sleep(_CLOSING_CHECK_SECONDS)
        return await asyncio.to_thread(run.read_health)

    return AccessLayer(app, access)


def _add_static(app: FastAPI) -> None:
    folder = resources.files("prime_rl.page") / "static"
    files = {item.name: item for item in folder.iterdir() if item.is_file()}
    files |= {f"vendor/{item.name}": item for item in (folder / "vendor").iterdir() if item.is_file()}

    @app.get("/")
    def index() -> Response:
        return Response(files["index.html"].read_bytes(), media_type=_MEDIA_TYPES[".html"])

    @app.get("/favicon.ico")
    def icon() -> Response:
        return Response(files["icon.svg"].read_bytes(), media_type=_MEDIA_TYPES[".svg"])

    @app.get("/static/{path:path}")
    def static(path: str) -> Response:
        if path not in files:
            raise HTTPException(404, "no such file")
        suffix = path[path.rindex(".") :]
        return Response(files[path].read_bytes(), media_type=_MEDIA_TYPES[suffix])


def _add_queries(app: FastAPI, by_name: dict[str, RunView], find: Any) -> None:
    @app.get("/api/runs")
    def list_runs() -> dict[str, Any]:
        return {"runs": [{"name": run.name, "root": str(run.paths.root)} for run in by_name.values()]}

    @app.get("/api/runs/{name}/overview")
    def overview(name: str) -> dict[str, Any]:
        return find(name).overview()

    @app.get("/api/runs/{name}/config")
    def config(name: str) -> dict[str, Any]:
        return find(name).settings()

    @app.get("/api/runs/{name}/series")
    def series(name: str, metric: Annotated[list[str], Query()], points: int = 800) -> dict[str, Any]:
        return find(name).series(metric, max(10, min(points, _MAX_POINTS)))

    @app.get("/api/runs/{name}/figures")
    def figures(name: str) -> dict[str, Any]:
        return {"figures": find(name).figures()}

    @app.get("/api/runs/{name}/rollouts")
    def rollouts(name: str, query: Annotated[SampleQuery, Query()]) -> dict[str, Any]:
        return find(name).search(query, query.position, query.count, query.evaluation)

    @app.get("/api/runs/{name}/rollouts/{step}/{group}/{rollout}")
    def rollout(name: str, step: int, group: int, rollout: int, evaluation: str | None = None) -> dict[str, Any]:
        found = find(name).rollout(step, group, rollout, evaluation)
        if found is None:
            place = "samples" if evaluation is None else f"evals/{evaluation}"
            raise HTTPException(404, f"{place} has no rollout {rollout} of group {group} of step {step}")
        return found

    @app.get("/api/runs/{name}/timeline")
    def timeline(name: str, begin: float | None = None, end: float | None = None, pixels: int = 1200) -> dict[str, Any]:
        return find(name).timeline(begin, end, pixels)

    @app.get("/api/runs/{name}/trace.json")
    def trace(name: str) -> Response:
        body = json.dumps(list(chrome_trace(find(name).read_timeline())))
        headers = {"content-disposition": 'attachment; filename="trace.json"'}
        return Response(body, media_type="application/json", headers=headers)


async def run_events(
    run: RunView, cursor: str, interval_seconds: float, is_closing: Callable[[], bool] = lambda: False
) -> AsyncIterator[str]:
    """Server-sent events of one run, from a cursor on, until the browser disconnects or the server stops.

    `metrics`: new lines, with the cursor as event id. `reload`: the series must be loaded again. `headline`, `counts`:
    their new values.
    """
    last: dict[str, Any] = {}
    ticks = 0
    # The browser asks for its first curves now, and reading the rest takes time.
    await _pause(interval_seconds, is_closing)
    run.health.start()
    while not is_closing():
        if ticks * interval_seconds >= _HEALTH_INTERVAL_SECONDS:
            run.health.start()
            ticks = 0
        updates = await asyncio.to_thread(run.updates, cursor)
        if updates is None:
            cursor = await asyncio.to_thread(run.cursor)
            yield _event("reload", {}, cursor)
        elif updates["cursor"] != cursor:
            cursor = updates["cursor"]
            if updates["rows"]:
                yield _event("metrics", updates["rows"], cursor)
        for name, read in (("headline", run.headline), ("counts", run.counts)):
            value = await asyncio.to_thread(read)
            if value != last.get(name):
                last[name] = value
                yield _event(name, value, cursor)
        if ticks % _PING_TICKS == 0:
            yield ": ping\n\n"
        ticks += 1
        await _pause(interval_seconds, is_closing)


async def _pause(seconds: float, is_closing: Callable[[], bool]) -> None:
    """Sleep, but not after the server stops: Ctrl-C would wait for the open tabs."""
    end = time.monotonic() + seconds
    while not is_closing() and (left := end - time.monotonic()) > 0:
        await asyncio.sleep(min(left, _CLOSING_CHECK_SECONDS))


def _event(name: str, data: Any, cursor: str) -> str:
    return f"event: {name}\nid: {cursor}\ndata: {json.dumps(data)}\n\n"
