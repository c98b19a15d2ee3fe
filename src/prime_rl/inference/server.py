"""Starts vLLM's OpenAI server with a policy that can be switched.

vLLM builds its application, its engine and its HTTP server; this module combines them as vLLM's own entry point does,
with our routes, our scheduler (`salted_scheduler`) and our worker extension (`worker_weight_update`). The heartbeat
advances as long as the engines answer. A server without the run's directory writes none; its clients notice its end by
their connections.
"""

import asyncio
import fcntl
import math
import os
import shutil
import signal
import socket
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
import uvloop
from loguru import logger
from pydantic import ValidationError

from prime_rl.configs.inference import InferenceConfig
from prime_rl.core.errors import ConfigError, RunError, summarize_exception, translate_error
from prime_rl.core.os_errors import allow_open_files
from prime_rl.core.ports import address_family, claim_port, join_host_port
from prime_rl.core.types import PolicyVersion
from prime_rl.inference.generation_stream import Generator, StreamHttpProtocol
from prime_rl.inference.node_registry import (
    ServerNodeMonitor,
    all_nodes,
    describe_death,
    exit_by_signal,
    node_info,
    resolve,
    run_headless,
)
from prime_rl.inference.policy.delta_cache import cache_root
from prime_rl.inference.policy.engine_group import EnginePause, VllmEngine
from prime_rl.inference.policy.named_adapters import NamedAdapters
from prime_rl.inference.policy.policy_manager import Lease, PolicyManager
from prime_rl.inference.policy.relayed_versions import RelayedVersions, relayed_versions
from prime_rl.inference.policy.slots import Slots
from prime_rl.inference.policy.weight_checks import ServedModel, find_base_model
from prime_rl.inference.request_layer import AccessRules, RequestLayer, keep_known_routes, prepare_requests
from prime_rl.inference.routes import make_router
from prime_rl.inference.vllm import engine_arguments
from prime_rl.inference.vllm.engine_arguments import read_engine_error
from prime_rl.liveness.heartbeat_monitor import SERVING
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.parent_process import ENGINE_DIRECTORY, ENGINE_SERVER, NODE_VARIABLE, is_supervised
from prime_rl.liveness.run_settings import MAX_ADAPTER_RANK, RECORDS_ROUTES, SERVED_DTYPE, SERVED_LENGTH
from prime_rl.storage.checkpoint_artifacts import write_json
from prime_rl.storage.weights.canary import PolicyCanary, canary_tokens

if TYPE_CHECKING:
    from fastapi import FastAPI
    from vllm.v1.engine.async_llm import AsyncLLM


_T = TypeVar("_T")

# To end the requests in flight and write their responses.
_CLOSE_TIMEOUT_SECONDS = 3
# The same after the engine died: its requests cannot end, and the user waits for the error.
_FAILED_CLOSE_TIMEOUT_SECONDS = 1

_DIRECTORY_PREFIX = "prime_rl_server_"
_TEMPORARY_NAME_LENGTH = len(f"/{_DIRECTORY_PREFIX}12345678/") + 36  # of a socket below the temporary folder
_MOST_SOCKET_PATH_LENGTH = 107

ROLE = "inference"
PAUSE = "pause"
UPDATES = "updates"
_INTERVAL_SECONDS = 1.0


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Bind the server's port before the slow start, so that a port in use is a ConfigError at once."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(address_family(host), socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place = f"server.port: cannot listen on {join_host_port(host, port)}"
        with translate_error(OSError, lambda error: ConfigError(f"{place} ({error.strerror}); set another port")):
            claim = stack.enter_context(claim_port(port))
            listener.bind((host, port))
        # A forked engine that outlives a killed server must not hold the port of the next server.
        for held in (listener, claim):
            os.register_at_fork(after_in_child=held.close)
        yield listener


def run(config: InferenceConfig) -> None:
    """Serve until SIGINT or SIGTERM; on a node without an HTTP server, until its head ends.

    Raises:
        ConfigError: the port, the model or an argument of vLLM is invalid.
        RunError: the engine died, its weights are undefined, or another node is lost.
    """
    with _private_directory():
        try:
            with translate_error(ValidationError, engine_arguments.explain_refusal):
                run_headless(config) if config.parallel.headless else _run(config)
        except RuntimeError as error:  # vLLM's, which names no cause
            if (cause := read_engine_error()) is not None:
                raise RunError(f"an engine did not start: {cause}") from error
            if "See root cause above" not in str(error):
                raise
            raise RunError(
                "an engine ended while it started, without an error of its own: it was killed, as by the system when "
                "memory is exhausted, or crashed; see the log before this line"
            ) from error


@contextmanager
def _private_directory() -> Iterator[None]:
    """Give the server and its engines a directory for temporary files, and remove it with those of killed servers.

    vLLM leaves three sockets and a file of each engine. A running server holds the lock of its directory.
    """
    place = Path(tempfile.gettempdir())
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(place / f"torchinductor_{os.getuid()}"))  # outlives servers
    if len(str(place)) + _TEMPORARY_NAME_LENGTH > _MOST_SOCKET_PATH_LENGTH:
        place = Path("/tmp")
    for old in place.glob(f"{_DIRECTORY_PREFIX}*"):
        _remove_directory_of_killed_server(old)
    folder = _make_locked_directory(place)
    try:
        os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"] = tempfile.tempdir = folder
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_locked_directory(place: Path) -> str:
    """Make a directory and lock it; another one if a server that starts now has removed it before that."""
    while True:
        folder = tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX, dir=place)
        with suppress(FileNotFoundError):
            fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)  # held until this process ends
            if Path(folder).exists():
                return folder


def _remove_directory_of_killed_server(folder: Path) -> None:
    with suppress(OSError):  # another server has removed it, or it belongs to another user
        lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(lock)


def _run(config: InferenceConfig) -> None:
    started = time.monotonic()
    with bound(config.server.host, config.server.port) as listener, server_heartbeat(config) as writer:
        access = AccessRules.for_address(config.server.api_key_var, listener.getsockname()[0])
        base = find_base_model(config.model)
        head = resolve(str(config.parallel.address)) if config.parallel.spans_nodes else None
        args = _prepare_vllm(config, base, head)
        writer.enter("start engines")
        signal.signal(signal.SIGTERM, exit_by_signal)  # until vLLM's HTTP server sets its own
        address = (head or "", config.parallel.rpc_port)
        wait_seconds, silence_seconds = config.parallel.wait_timeout_seconds, config.heartbeat.dead_after_seconds
        with all_nodes(node_info(config, base), config.parallel.dp, address, wait_seconds, silence_seconds) as nodes:
            uvloop.run(_serve(config, args, base, listener, access, started, nodes, writer))
    shutil.rmtree(cache_root(config.weights_cache, config.server.port), ignore_errors=True)


def _prepare_vllm(config: InferenceConfig, base: ServedModel, head: str | None) -> Namespace:
    on_cpu = engine_arguments.prepare_vllm(config, base.policy.path)
    args = engine_arguments.make_arguments(config, base.policy.path, on_cpu, head)
    engine_arguments.load_plugins(args)
    allow_open_files()
    if config.parallel.dp > 1:
        from prime_rl.inference.vllm import patches

        forks = engine_arguments.forks_engines(config, on_cpu)
        patches.end_coordinator_with_server(forks, config.parallel.wait_timeout_seconds)
    return args


async def _serve(
    config: InferenceConfig,
    args: Namespace,
    base: ServedModel,
    listener: socket.socket,
    access: AccessRules,
    started: float,
    nodes: ServerNodeMonitor,
    writer: HeartbeatWriter,
) -> None:
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.launcher import NoSignalServer

    if access.admin_refusal:
        logger.warning("every client that can connect to {} may sample; {}", args.host, access.admin_refusal)
    loop = asyncio.get_running_loop()
    end: asyncio.Future[str | None] = loop.create_future()
    async with relayed_versions(config) as relayed, build_async_engine_client(args) as client:
        nodes.on_loss(lambda reason: loop.call_soon_threadsafe(_end, end, reason))
        app, base_slot, pause, generator = await _unless_ended(
            _make_app(config, args, base, client, access, nodes, partial(_end, end), writer, relayed), end
        )
        logger.info(f"serving {config.model.name} on port {args.port} after {time.monotonic() - started:.1f} s")

        async def check() -> None:
            await client.engine_core.call_utility_all_async("last_pause")
            await pause.wait_until_sampling()  # paused engines answer, too

        async with serving(writer, check, config.engine_timeout_seconds):
            layer = RequestLayer(app, access, lambda: base_slot.policy.version)
            http = NoSignalServer(_http_config(layer, access, generator, args))
            app.state.server = http  # vLLM's error handlers use the state
            await _serve_http(http, client, listener, end)
    if reason := end.result():
        raise RunError(reason)


async def _make_app(
    config: InferenceConfig,
    args: Namespace,
    base: ServedModel,
    client: "AsyncLLM",
    access: AccessRules,
    nodes: ServerNodeMonitor,
    fail: Callable[[str], None],
    writer: HeartbeatWriter,
    relayed: RelayedVersions | None,
) -> "tuple[FastAPI, PolicyManager, EnginePause, Generator]":
    """Make vLLM's application with our routes and the generator of token streams; set the version of the engines."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    from prime_rl.inference.vllm.token_generator import TokenGenerator

    engine = VllmEngine(client, config.kv_cache_on_weight_update == "recompute", nodes.places)
    await engine.prepare(base.policy, cache_root(config.weights_cache, config.server.port))
    if is_supervised():
        await _write_kv_cache_size(engine, config.run_paths.kv_cache)
    max_rank = config.max_lora_rank if config.enable_lora else None
    pause, tolerance, on_phase = EnginePause(engine, fail), config.canary_tolerance, phase_recorder(writer)

    def make_slot(number: int, name: str) -> PolicyManager:
        lease = Lease(config.lease_seconds, subject=f"slot {name}" if name else "this server")
        return PolicyManager(
            engine, pause, base, lease, number, tolerance, max_rank, config.pin_timeout_seconds, on_phase,
            copy=relayed.copy if relayed is not None else None,
        )  # fmt: skip

    capacity = config.max_loras if config.enable_lora else 0
    slots = Slots(make_slot, args.served_model_name, capacity, is_relayed=relayed is not None)
    await slots.base.start()
    tasks = await client.get_supported_tasks()
    app = build_app(args, tasks, client.model_config)
    await init_app_state(client, app.state, args, tasks)
    keep_known_routes(app)
    adapters = None
    if config.enable_lora:
        from prime_rl.inference.vllm import patches

        slots.requests = app.state.openai_serving_models.lora_requests
        adapters = NamedAdapters(slots, engine)
        patches.tag_tokens_by_adapter()
    send = client.engine_core.add_request_async
    prepare = prepare_requests(client, slots, engine.canary_prefix)
    ask, vocabulary = engine.prompt_logprobs, client.model_config.get_vocab_size()
    name, timeout_seconds = args.served_model_name[0], config.engine_timeout_seconds
    precision = client.model_config.quantization or engine.dtype
    canary = await run_self_test(ask, vocabulary, precision, config.model.name, timeout_seconds, nodes.places)
    slots.base.base_canary = canary
    settings = {
        "model.name": name, "model.revision": config.model.revision, SERVED_DTYPE: engine.dtype,
        SERVED_LENGTH: client.model_config.max_model_len, MAX_ADAPTER_RANK: max_rank,
        RECORDS_ROUTES: int(config.enable_return_routed_experts),
    }  # fmt: skip
    app.include_router(make_router(slots, name, access.admin_refusal, adapters, canary, tolerance, settings))
    return app, slots.base, pause, TokenGenerator(client, app.state, prepare, send)


async def _write_kv_cache_size(engine: VllmEngine, file: Path) -> None:
    """Write the measured size for a restart while the trainer runs, when vLLM cannot measure it."""
    size = await engine.kv_cache_bytes()
    try:
        write_json(file, {"bytes": size})
    except OSError as error:
        logger.warning("{} cannot be written ({}); a restart measures again", file, error.strerror)


async def _unless_ended(work: Coroutine[Any, Any, _T], end: "asyncio.Future[str | None]") -> _T:
    """Await `work`, or raise RunError as soon as `end` has a reason: calls to a lost node never return."""
    task: asyncio.Future[_T] = asyncio.ensure_future(work)
    either: set[asyncio.Future[Any]] = {task, end}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if end.done() and (reason := end.result()):
        task.cancel()
        raise RunError(reason)
    return await task


async def _serve_http(
    http: uvicorn.Server, client: "AsyncLLM", listener: socket.socket, end: "asyncio.Future[str | None]"
) -> None:
    """Serve until `end` has a result: None after SIGINT or SIGTERM, or the reason of a failure.

    Requests in flight end with the tokens so far (finish_reason "abort"), or with an error if the engine is dead.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _end, end, None)
    for process in client.engine_core.resources.engine_manager.processes:
        loop.add_reader(process.sentinel, _end, end, partial(describe_death, process))
    serving: asyncio.Future[Any] = asyncio.create_task(http.serve(sockets=[listener]))
    await asyncio.wait({serving, end}, return_when=asyncio.FIRST_COMPLETED)
    _end(end, "the HTTP server stopped unexpectedly; its log is above")
    timeout_seconds = _CLOSE_TIMEOUT_SECONDS if end.result() is None else _FAILED_CLOSE_TIMEOUT_SECONDS
    http.config.timeout_graceful_shutdown = timeout_seconds
    http.should_exit = True
    await abort_requests(client, timeout_seconds)
    await serving


async def abort_requests(client: "AsyncLLM", timeout_seconds: float) -> None:
    """End the requests in flight with the tokens so far. The engine may be dead or ending.

    Slurm, for example, sends SIGTERM to all processes of a job step. An ending engine raises an exception without a
    specific type.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        async with asyncio.timeout(timeout_seconds):
            await client.pause_generation(mode="abort", clear_cache=False)
    except Exception as error:  # noqa: BLE001  the server ends in any case
        if not isinstance(error, EngineDeadError | TimeoutError):
            logger.info("could not abort the requests in flight: {}", error)


def _end(end: "asyncio.Future[str | None]", reason: str | Callable[[], str] | None) -> None:
    """Set the reason of the end; the first one counts."""
    if not end.done():
        end.set_result(reason() if callable(reason) else reason)


def _http_config(app: RequestLayer, access: AccessRules, generator: Generator, args: Namespace) -> uvicorn.Config:
    """Configure the HTTP server as vLLM's entry point does, with token streams."""
    from vllm import envs
    from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config

    names = ("keyfile", "certfile", "ca_certs", "cert_reqs", "ciphers")
    options = {f"ssl_{name}": getattr(args, f"ssl_{name}") for name in names}
    if (log_config := get_uvicorn_log_config(args)) is not None:
        options["log_config"] = log_config
    protocol: Any = partial(StreamHttpProtocol, access=access, generator=generator)
    return uvicorn.Config(
        app,
        http=protocol,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
        **options,
    )


async def run_self_test(
    ask: Callable[[tuple[int, ...]], Awaitable[list[list[float]]]],
    vocabulary: int,
    dtype: str,
    model: str,
    timeout_seconds: float,
    places: Sequence[str] = (),
) -> PolicyCanary:
    """Compute log-probabilities of the canary's tokens on each copy of the model, by `ask`: [T - 1] on each.

    This is the first request, before the server reports that it is ready: some models load and then crash the engine in
    their first forward pass. The result is kept for a comparison with the trainer's (`GET /base_canary`).

    `vocabulary` is its size, `dtype` the engine's precision or quantization; `model` and `places` name the model and
    its copies in messages. Returns the log-probabilities of the first copy. Raises RunError if an engine died or did
    not answer, a log-probability is not finite, or copies disagree.
    """
    tokens = tuple(canary_tokens(vocabulary).tolist())
    request = f"self-test of the engine ({len(tokens)} tokens to {model})"
    try:
        async with asyncio.timeout(timeout_seconds):
            answers = await ask(tokens)
    except Exception as error:
        if isinstance(error, TimeoutError):
            raise RunError(f"{request}: no answer within {timeout_seconds:.0f} s (engine_timeout_seconds)") from None
        raise RunError(
            f"{request} failed: vLLM loaded the model, but cannot run it with these settings; the engine's "
            f"error is above ({summarize_exception(error)})"
        ) from error
    canary = PolicyCanary(tokens, tuple(answers[0]), dtype)
    for rank, answer in enumerate(answers):
        place = f" ({places[rank]})" if len(answers) > 1 else ""
        if not all(map(math.isfinite, answer)):
            raise RunError(
                f"{request} gave log-probabilities that are not finite in {dtype}{place}; try model.dtype = bfloat16 "
                "or float32, and check the model's files"
            )
        if not (compared := canary.compare(answer, dtype)).passes:
            raise RunError(
                f"{request} gave another result on a copy of the model{place}: the {compared.which} difference between "
                f"log-probabilities is {compared.difference:.3g}"
            )
    return canary


def server_name(config: InferenceConfig) -> str:
    """Return the name of heartbeat and log: `inference` under `rl`, with the node if there are several.

    That of a standalone server has host and port.
    """
    if is_supervised() and (node := os.environ.get(NODE_VARIABLE)):
        return f"{ROLE}_{node}"
    return ROLE if is_supervised() else f"{ROLE}_{socket.gethostname()}_{config.server.port}"


@contextmanager
def server_heartbeat(config: InferenceConfig) -> Iterator[HeartbeatWriter]:
    """Write heartbeats while the server starts and runs, if `output_dir` is set."""
    writer = HeartbeatWriter(config.run_paths, server_name(config), ROLE)
    writer.enter_imports("vLLM")
    has_directory = "output_dir" in config.model_fields_set
    if has_directory:
        config.record(config.run_paths, server_name(config))
        os.environ[ENGINE_DIRECTORY] = str(config.run_paths.root.absolute())
        os.environ[ENGINE_SERVER] = server_name(config)
    with writer if has_directory else nullcontext():
        yield writer


def phase_recorder(writer: HeartbeatWriter) -> Callable[[str, float, PolicyVersion], None]:
    """Return a function that adds a phase, which ends now, to the timeline: name, start in Unix seconds, version.

    `pause` interrupts serving. The others overlap serving or the pause, so they are in the timeline of the updates. The
    function does nothing for a server without the run's directory.
    """

    def record(name: str, start: float, version: PolicyVersion) -> None:
        if not writer.is_started:
            return
        if name == PAUSE:
            writer.interrupt(name, start, version.step)
        else:
            writer.part(UPDATES).add(name, start, time.time(), version=version.step)

    return record


@asynccontextmanager
async def serving(
    writer: HeartbeatWriter, check: Callable[[], Awaitable[Any]], timeout_seconds: float
) -> AsyncIterator[None]:
    """Write heartbeats of phase "serve" for the length of the block, while the event loop runs.

    They show progress only while `check` returns within `timeout_seconds`: when all engines have answered and sample.
    An exception ends the polling.
    """

    async def poll() -> None:
        while True:
            await check()
            writer.advance()
            await asyncio.sleep(_INTERVAL_SECONDS)

    writer.watch_event_loop(asyncio.get_running_loop())
    writer.enter(SERVING, timeout_seconds)
    task = asyncio.create_task(poll())
    try:
        yield
    finally:
        writer.enter("end")
        writer.watch_event_loop(None)
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # of a dead engine, which the server has reported
