"""Starts vLLM's OpenAI server with a policy that can be switched.

vLLM builds its application, its engine and its HTTP server; this module combines them as vLLM's own entry point does,
with our routes, our scheduler (`salted_scheduler`) and our worker extension (`worker_weight_update`).
"""

import asyncio
import os
import shutil
import signal
import socket
import time
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
import uvloop
from loguru import logger

from prime_rl.configs.inference import InferenceConfig
from prime_rl.core.errors import ConfigError, RunError, translate_error
from prime_rl.core.os_errors import allow_open_files
from prime_rl.core.ports import address_family, claim_port, join_host_port
from prime_rl.inference.generation_stream import Generator, StreamHttpProtocol
from prime_rl.inference.model_path import find_base_model
from prime_rl.inference.multinode.headless_node import exit_by_signal, node_info, run_headless
from prime_rl.inference.multinode.node_registry import NodeMonitor, all_nodes, resolve
from prime_rl.inference.policy.delta_cache import cache_root
from prime_rl.inference.policy.named_adapters import NamedAdapters
from prime_rl.inference.policy.policy_manager import PolicyManager
from prime_rl.inference.policy.relayed_versions import RelayedVersions, relayed_versions
from prime_rl.inference.policy.run_lease import Lease
from prime_rl.inference.policy.weight_checks import ServedModel
from prime_rl.inference.request_layer import AccessRules, RequestLayer, keep_known_routes, prepare_requests
from prime_rl.inference.routes import make_router
from prime_rl.inference.self_test import run_self_test
from prime_rl.inference.server_heartbeat import phase_recorder, server_heartbeat, serving
from prime_rl.inference.vllm import engine_arguments
from prime_rl.inference.vllm.engine_group import VllmEngine
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.parent_process import is_supervised
from prime_rl.liveness.run_settings import MAX_ADAPTER_RANK, SERVED_DTYPE, SERVED_LENGTH
from prime_rl.storage.checkpoint_artifacts import write_json

if TYPE_CHECKING:
    from fastapi import FastAPI
    from vllm.v1.engine.async_llm import AsyncLLM

_T = TypeVar("_T")

# To end the requests in flight and write their responses.
_CLOSE_TIMEOUT_S = 3
# The same after the engine died: its requests cannot end, and the user waits for the error.
_FAILED_CLOSE_TIMEOUT_S = 1


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
    if config.parallel.headless:
        run_headless(config)
        return
    started = time.monotonic()
    with bound(config.server.host, config.server.port) as listener, server_heartbeat(config) as writer:
        access = AccessRules.for_address(config.server.api_key_var, listener.getsockname()[0])
        base = find_base_model(config.model.name, config.vllm.get("revision"))
        head = resolve(str(config.parallel.address)) if config.parallel.spans_nodes else None
        args = _prepare_vllm(config, base, head)
        signal.signal(signal.SIGTERM, exit_by_signal)  # until vLLM's HTTP server sets its own
        address = (head or "", config.parallel.rpc_port)
        wait_s, silence_s = config.parallel.wait_timeout_seconds, config.heartbeat.dead_after_seconds
        with all_nodes(node_info(config, base), config.parallel.dp, address, wait_s, silence_s) as nodes:
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
    nodes: NodeMonitor,
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
        app, policies, generator = await _unless_ended(
            _make_app(config, args, base, client, access, nodes, partial(_end, end), writer, relayed), end
        )
        logger.info(f"serving {config.model.name} on port {args.port} after {time.monotonic() - started:.1f} s")

        async def check() -> None:
            await client.engine_core.call_utility_all_async("last_pause")
            await policies.wait_until_sampling()  # paused engines answer, too

        async with serving(writer, check, config.engine_timeout_seconds):
            layer = RequestLayer(app, access, policies.pins, lambda: policies.policy.version)
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
    nodes: NodeMonitor,
    fail: Callable[[str], None],
    writer: HeartbeatWriter,
    relayed: RelayedVersions | None,
) -> "tuple[FastAPI, PolicyManager, Generator]":
    """Make vLLM's application with our routes and the generator of token streams; set the version of the engines."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    from prime_rl.inference.vllm.token_generator import TokenGenerator

    engine = VllmEngine(client, config.kv_cache_on_weight_update == "recompute", nodes.places)
    await engine.prepare(base.policy, cache_root(config.weights_cache, config.server.port))
    if is_supervised():
        await _write_kv_cache_size(engine, config.run_paths.kv_cache)
    max_rank = config.max_lora_rank if config.enable_lora else None
    pin_s, tolerance = config.pin_timeout_seconds, config.canary_tolerance
    policies = PolicyManager(
        engine, base, Lease(config.lease_seconds), fail, tolerance, max_rank, pin_s, phase_recorder(writer),
        copy=relayed.copy if relayed is not None else None,
    )  # fmt: skip
    await policies.start()
    tasks = await client.get_supported_tasks()
    app = build_app(args, tasks, client.model_config)
    await init_app_state(client, app.state, args, tasks)
    keep_known_routes(app)
    adapters = None
    if config.enable_lora:
        from prime_rl.inference.vllm import patches

        requests = app.state.openai_serving_models.lora_requests
        adapters = NamedAdapters(policies, engine, requests, config.max_loras - 1, args.served_model_name)
        patches.tag_named_adapters(adapters.version_of)
    send = client.engine_core.add_request_async
    prepare = prepare_requests(client, policies, adapters, engine.canary_prefix)
    ask, vocabulary = engine.prompt_logprobs, client.model_config.get_vocab_size()
    name, timeout_s = args.served_model_name[0], config.engine_timeout_seconds
    canary = await run_self_test(ask, vocabulary, engine.dtype, config.model.name, timeout_s, nodes.places)
    settings = {
        "model.name": name, SERVED_DTYPE: engine.dtype, SERVED_LENGTH: client.model_config.max_model_len,
        MAX_ADAPTER_RANK: max_rank,
    }  # fmt: skip
    app.include_router(make_router(policies, name, access.admin_refusal, adapters, canary, tolerance, settings))
    return app, policies, TokenGenerator(client, app.state, prepare, send)


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
        loop.add_reader(process.sentinel, _end, end, f"{process.name} (pid {process.pid}) died; its log is above")
    serving: asyncio.Future[Any] = asyncio.create_task(http.serve(sockets=[listener]))
    await asyncio.wait({serving, end}, return_when=asyncio.FIRST_COMPLETED)
    _end(end, "the HTTP server stopped unexpectedly; its log is above")
    timeout_s = _CLOSE_TIMEOUT_S if end.result() is None else _FAILED_CLOSE_TIMEOUT_S
    http.config.timeout_graceful_shutdown = timeout_s
    http.should_exit = True
    await abort_requests(client, timeout_s)
    await serving


async def abort_requests(client: "AsyncLLM", timeout_s: float) -> None:
    """End the requests in flight with the tokens so far. The engine may be dead or ending.

    Slurm, for example, sends SIGTERM to all processes of a job step. An ending engine raises an exception without a
    specific type.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        async with asyncio.timeout(timeout_s):
            await client.pause_generation(mode="abort", clear_cache=False)
    except Exception as error:  # noqa: BLE001  the server ends in any case
        if not isinstance(error, EngineDeadError | TimeoutError):
            logger.info("could not abort the requests in flight: {}", error)


def _end(end: "asyncio.Future[str | None]", reason: str | None) -> None:
    """Set the reason of the end; the first one counts."""
    if not end.done():
        end.set_result(reason)


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
