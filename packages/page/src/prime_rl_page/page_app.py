"""The web application of `page`: static files, JSON of the runs, one event stream per browser tab, /metrics."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from importlib import resources
from itertools import chain
from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI, HTTPException, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field
from starlette.responses import Response, StreamingResponse

from prime_rl.core.api_key import API_KEY_VAR
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.os_errors import SystemResourceError
from prime_rl.liveness.heartbeat_monitor import read_heartbeats
from prime_rl_page.page_access import AccessLayer, PageAccess
from prime_rl_page.run_data.metric_series import MetricFile, Series
from prime_rl_page.run_data.rollout_detail import RolloutNote
from prime_rl_page.run_data.run_view import RunList, RunView
from prime_rl_page.run_data.sample_index import SampleFilter
from prime_rl_page.run_data.timeline_spans import chrome_trace

STREAM_INTERVAL_SECONDS = 1.0
_HEALTH_INTERVAL_SECONDS = 5.0
_PING_TICKS = 15
_CLOSING_CHECK_SECONDS = 0.1
_MAX_POINTS = 4000
_MAX_CHAT_CHARS = 100_000
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
    runs: RunList,
    access: PageAccess,
    interval_seconds: float = STREAM_INTERVAL_SECONDS,
    is_closing: Callable[[], bool] = lambda: False,
) -> Any:
    """The ASGI application, which checks the access of each request. Its streams end when `is_closing` returns true."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    def find(name: str) -> RunView:
        if (run := runs.find(name)) is None:
            raise HTTPException(404, "no such run")
        return run

    _add_static(app)
    _add_queries(app, runs, find)
    _add_chat(app, find)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(prometheus_text(runs.read()), media_type=CONTENT_TYPE_LATEST)

    @app.get("/api/runs/{name}/stream")
    async def stream(name: str, request: Request, cursor: str = "") -> StreamingResponse:
        begin = request.headers.get("last-event-id") or cursor
        run = await asyncio.to_thread(find, name)
        events = run_events(run, begin, interval_seconds, is_closing, runs.describe)
        return StreamingResponse(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    @app.get("/api/runs/{name}/health")
    async def health(name: str) -> dict[str, Any]:
        run = await asyncio.to_thread(find, name)
        examination = run.health.start()
        while examination.is_alive():
            if is_closing():
                raise HTTPException(503, "the page ends")
            await asyncio.sleep(_CLOSING_CHECK_SECONDS)
        return await asyncio.to_thread(run.read_health)

    return AccessLayer(app, access)


def _add_static(app: FastAPI) -> None:
    folder = resources.files("prime_rl_page") / "static"
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


def _add_queries(app: FastAPI, runs: RunList, find: Any) -> None:
    @app.get("/api/runs")
    def list_runs() -> dict[str, Any]:
        return {"runs": runs.describe()}

    @app.get("/api/runs/{name}/overview")
    def overview(name: str) -> dict[str, Any]:
        return find(name).overview()

    @app.get("/api/runs/{name}/config")
    def config(name: str) -> dict[str, Any]:
        return find(name).settings()

    @app.get("/api/runs/{name}/settings")
    def settings(name: str) -> dict[str, Any]:
        return {"text": find(name).settings_text()}

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

    @app.get("/api/runs/{name}/rollouts/{step}/{group}/{rollout}/history")
    def history(name: str, step: int, group: int, rollout: int, evaluation: str | None = None) -> dict[str, Any]:
        return {"steps": find(name).history(step, group, rollout, evaluation)}

    @app.post("/api/runs/{name}/notes", status_code=204)
    def add_note(name: str, note: RolloutNote) -> None:
        try:
            if not find(name).add_note(note):
                raise HTTPException(404, f"no rollout {note.rollout} of group {note.group} of step {note.step}")
        except SystemResourceError as error:
            raise HTTPException(507, str(error)) from None

    @app.get("/api/runs/{name}/notes.jsonl")
    def notes(name: str) -> Response:
        file = find(name).notes.path
        headers = {"content-disposition": 'attachment; filename="notes.jsonl"'}
        body = file.read_bytes() if file.exists() else b""
        return Response(body, media_type="application/jsonl; charset=utf-8", headers=headers)

    @app.get("/api/runs/{name}/timeline")
    def timeline(name: str, begin: float | None = None, end: float | None = None, pixels: int = 1200) -> dict[str, Any]:
        return find(name).timeline(begin, end, pixels)

    @app.get("/api/runs/{name}/trace.json")
    def trace(name: str) -> Response:
        body = json.dumps(list(chrome_trace(find(name).read_timeline())))
        headers = {"content-disposition": 'attachment; filename="trace.json"'}
        return Response(body, media_type="application/json", headers=headers)


class ChatMessage(BaseModel):
    """A message of a conversation on the page."""

    role: Literal["user", "assistant"]
    content: str = Field(max_length=_MAX_CHAT_CHARS)


def _add_chat(app: FastAPI, find: Callable[[str], RunView]) -> None:
    """Add the chat with the policy that the run's server samples from at the moment."""

    def served(name: str) -> tuple[Any, int | None]:
        from prime_rl.entrypoints.delivery.served_policy import ServedPolicy  # the first curves do not wait for it

        try:
            policy = ServedPolicy(find(name).paths)
        except ConfigError as error:
            raise HTTPException(409, str(error)) from None
        if policy.key_var != API_KEY_VAR:  # a copied run directory could name any secret of this user
            raise HTTPException(409, f"the run's key is in {policy.key_var}; use `uv run chat`")
        return policy, policy.step()

    @app.get("/api/runs/{name}/chat")
    def state(name: str) -> dict[str, Any]:
        return {"step": served(name)[1]}

    @app.post("/api/runs/{name}/chat")
    def chat(name: str, messages: Annotated[list[ChatMessage], Body(min_length=1, max_length=200)]) -> Response:
        policy, step = served(name)
        if step is None:
            raise HTTPException(409, "the run's server does not run")
        parts = policy.reply(policy.url, [message.model_dump() for message in messages])
        try:
            first = next(parts, "")
        except RunError as error:
            raise HTTPException(502, str(error)) from None
        return StreamingResponse(chain([first], parts), media_type="text/plain", headers={"x-policy-step": str(step)})


async def run_events(
    run: RunView,
    cursor: str,
    interval_seconds: float,
    is_closing: Callable[[], bool] = lambda: False,
    describe_runs: Callable[[], Any] = lambda: None,
) -> AsyncIterator[str]:
    """Server-sent events of one run, from a cursor on, until the browser disconnects or the server stops.

    `metrics`: new lines, with the cursor as event id. `reload`: the series must be loaded again. `headline`, `counts`,
    `runs` (all that the page shows): their new values.
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
        for name, read in (("headline", run.headline), ("counts", run.counts), ("runs", describe_runs)):
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


Family = CounterMetricFamily | GaugeMetricFamily
GAUGES = {
    "prime_rl_policy_lag_versions": ("orchestrator", "staleness/mean", "Mean staleness of the latest batch"),
    "prime_rl_policy_lag_max_versions": ("orchestrator", "staleness/max", "Largest staleness of the latest batch"),
    "prime_rl_truncated_ratio": ("orchestrator", "is_truncated/mean", "Share of truncated rollouts, latest batch"),
    "prime_rl_switch_seconds": ("orchestrator", "time/weight_update", "Duration of the latest weight update"),
    "prime_rl_mismatch_kl_nats": ("trainer", "mismatch_kl", "KL divergence of sampler and trainer in the latest step"),
    "prime_rl_entropy_nats": ("trainer", "entropy", "Entropy of the policy in the latest step"),
    "prime_rl_gradient_norm": ("trainer", "grad_norm", "Gradient norm of the latest step before clipping"),
    "prime_rl_loss": ("trainer", "loss", "Loss of the latest step"),
    "prime_rl_learning_rate": ("trainer", "lr", "Learning rate of the latest step"),
    "prime_rl_runs_active": ("trainer", "runs/active", "Runs with a slot of a trainer of several runs"),
    "prime_rl_runs_waiting": ("trainer", "runs/waiting", "Runs that wait for a slot"),
    "prime_rl_step_seconds": ("trainer", "time/step", "Duration of the latest step"),
    "prime_rl_model_flops_ratio": ("trainer", "perf/mfu", "Model FLOPs utilisation of the latest step"),
}
"""Gauges that are one metric each: name -> process, metric, help."""


class RunCollector(Collector):
    """Collects the metrics of some runs from their directories at each scrape."""

    def __init__(self, runs: Sequence[RunView]) -> None:
        self._runs = runs

    def collect(self) -> Iterable[Family]:
        """Yield one family per metric, with a sample per run."""
        families: dict[str, Family] = {}
        for run in self._runs:
            if run.has_left():
                continue
            for kind, name, text, labels, value in _samples(run):
                labels = {"run": run.name, **labels}
                if name not in families:
                    families[name] = kind(name, text, labels=list(labels))
                families[name].add_metric([labels[key] for key in labels], value)
        return list(families.values())


def prometheus_text(runs: Sequence[RunView]) -> bytes:
    """The metrics of all runs."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(runs))
    return generate_latest(registry)


def _samples(run: RunView) -> Iterator[tuple[type[Family], str, str, dict[str, str], float]]:
    metrics = run.read_metrics()
    orchestrator, trainer = metrics["orchestrator"], metrics["trainer"]
    if (steps := trainer.series.get("time/step")) is not None:
        yield GaugeMetricFamily, "prime_rl_step", "Steps that the trainer has finished", {}, steps.steps[-1] + 1
    for name, (process, metric, text) in GAUGES.items():
        if (value := _last(metrics[process], metric)) is not None:
            yield GaugeMetricFamily, name, text, {}, value
    for metric, series in orchestrator.series.items():
        area, _, rest = metric.partition("/")
        if area == "reward" and rest.endswith("/mean") and len(series) and rest != "sampled/mean":
            env = rest.removesuffix("/mean")
            text = "Mean reward of the latest batch"
            yield GaugeMetricFamily, "prime_rl_reward_mean", text, {"env": env}, series.values[-1]
    text = "Tokens that inference sampled, and tokens that the trainer trained on"
    if (sampled := _last(orchestrator, "tokens/sampled")) is not None:
        yield CounterMetricFamily, "prime_rl_tokens", text, {"role": "inference"}, sampled
    if (trained := trainer.series.get("tokens")) is not None:
        yield CounterMetricFamily, "prime_rl_tokens", text, {"role": "trainer"}, sum(trained.values)
    yield from _waits(run, orchestrator.series, trainer.series)
    now = time.time()
    for name, beat in read_heartbeats(run.paths).items():
        text = "Seconds since the last heartbeat"
        age = max(0.0, now - beat.touched / 1e9)  # the clock of the writer's host may differ
        yield GaugeMetricFamily, "prime_rl_heartbeat_age_seconds", text, {"process": name}, age


def _waits(
    run: RunView, orchestrator: dict[str, Series], trainer: dict[str, Series]
) -> Iterator[tuple[type[Family], str, str, dict[str, str], float]]:
    """Waits from the timeline; without one, those that the metrics contain."""
    name, text = "prime_rl_wait_seconds", "Seconds that a process waited for another one"
    found = False
    for lane in run.read_timeline().lanes.values():
        for role, seconds in lane.totals(float("-inf"), float("inf"))["waits"].items():
            found = True
            yield CounterMetricFamily, name, text, {"process": lane.name, "waiting_for": role}, seconds
    if found:
        return
    for process, role, series in (
        ("trainer", "orchestrator", trainer.get("time/wait_for_batch")),
        ("orchestrator", "trainer", orchestrator.get("time/wait_for_policy")),
    ):
        if series is not None:
            labels = {"process": process, "waiting_for": role}
            yield CounterMetricFamily, name, text, labels, sum(series.values)


def _last(file: MetricFile, name: str) -> float | None:
    series = file.series.get(name)
    return series.values[-1] if series is not None and len(series) else None
