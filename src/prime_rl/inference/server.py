"""Starting vLLM's OpenAI server with a policy that can be switched.

vLLM builds its application, its engine and its HTTP server; this module puts them together as vLLM's own entry point
does, with our routes, our scheduler (`scheduler.make_scheduler`) and our worker extension in place.
"""

import asyncio
import os
import shutil
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
import uvloop
from loguru import logger

from prime_rl.errors import ConfigError, RunError
from prime_rl.inference import arguments
from prime_rl.inference.access import Access, GuardedRequests
from prime_rl.inference.engine import VllmEngine
from prime_rl.inference.headless import member_of, run_headless
from prime_rl.inference.lease import Lease
from prime_rl.inference.model import BaseModel, find_base_model
from prime_rl.inference.named_adapters import NamedAdapters
from prime_rl.inference.nodes import Nodes, all_nodes, resolve
from prime_rl.inference.pins import PinnedRequests
from prime_rl.inference.policy import PolicyServer
from prime_rl.inference.pulse import asking, server_heartbeat
from prime_rl.inference.replica import replica_root
from prime_rl.inference.requests import NamesInVllm, prepare_requests
from prime_rl.inference.routes import make_router
from prime_rl.inference.version_header import PolicyVersionHeader
from prime_rl.run.heart import Heartbeat
from prime_rl.run.ports import claim_port

if TYPE_CHECKING:
    from fastapi import FastAPI
    from vllm.v1.engine.async_llm import AsyncLLM

    from prime_rl.configs.inference import InferenceConfig

_T = TypeVar("_T")

# To end the requests in flight, and then to write their answers.
_CLOSE_TIMEOUT_S = 3
# The same where the engine is dead: what waits for it waits in vain, and who looks for the cause waits for us.
_FAILED_CLOSE_TIMEOUT_S = 1


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Bind the server's port, long before there is anything to serve: a port in use is told at once.

    Raises:
        ConfigError: the port is taken, or the address is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            claim = stack.enter_context(claim_port(port))
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"server.port: cannot listen on {host}:{port} ({error.strerror}); set another port"
            ) from None
        # An engine that is forked must not keep the port from the next server, for as long as it outlives a killed one.
        for held in (listener, claim):
            os.register_at_fork(after_in_child=held.close)
        yield listener


def run(config: "InferenceConfig") -> None:
    """Serve until SIGINT or SIGTERM; on a node without an HTTP server, until its head has ended.

    Raises:
        ConfigError: the port, the model or an argument of vLLM's is wrong.
        RunError: the engine died, its weights became undefined, or another node is lost.
    """
    if config.parallel.headless:
        run_headless(config)
        return
    if config.parallel.start_rank:
        raise ConfigError(
            f"parallel.start_rank = {config.parallel.start_rank}: the node with the HTTP server has the first copies, "
            "from 0; the other nodes are started with --headless"
        )
    started = time.monotonic()
    with bound(config.server.host, config.server.port) as listener, server_heartbeat(config) as heart:
        access = Access.of(config.server.api_key_var, listener.getsockname()[0])
        base = find_base_model(config.model.name, config.vllm.get("revision"))
        head = resolve(str(config.parallel.address)) if config.parallel.spans_nodes else None
        args = _prepare_vllm(config, base, head)
        signal.signal(signal.SIGTERM, _end_start)  # until vLLM's HTTP server sets its own
        with all_nodes(
            member_of(config, base),
            config.parallel.dp,
            (head or "", config.parallel.rpc_port),
            config.parallel.wait_timeout_seconds,
            config.heartbeat.timeout,
        ) as nodes:
            uvloop.run(_serve(config, args, base, listener, access, started, nodes, heart))
    shutil.rmtree(replica_root(config.weights_cache, config.server.port), ignore_errors=True)


def _prepare_vllm(config: "InferenceConfig", base: BaseModel, head: str | None) -> Namespace:
    on_cpu = arguments.runs_on_cpu()
    arguments.check_copies(config, base.policy.path, on_cpu)
    forks = arguments.forks_engines(config, on_cpu)
    arguments.prepare_environment(config, on_cpu)
    args = arguments.make_arguments(config, base.policy.path, on_cpu, head)

    from prime_rl.inference import patches

    if forks:
        patches.start_fast_on_cpu()
    if config.parallel.dp > 1:
        patches.end_coordinator_with_server(forks)
    return args


async def _serve(
    config: "InferenceConfig",
    args: Namespace,
    base: BaseModel,
    listener: socket.socket,
    access: Access,
    started: float,
    nodes: Nodes,
    heart: Heartbeat,
) -> None:
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client

    if access.why_not_steered:
        logger.warning("whoever reaches {} may sample; {}", args.host, access.why_not_steered)
    loop = asyncio.get_running_loop()
    end: asyncio.Future[str | None] = loop.create_future()
    async with build_async_engine_client(args) as client:

        def lost(reason: str) -> None:
            loop.call_soon_threadsafe(_end, end, reason)

        nodes.tell(lost)
        app, policies = await _unless_ended(
            _make_app(config, args, base, client, access, nodes, partial(_end, end)), end
        )
        logger.info(f"serving {config.model.name} on port {args.port} after {time.monotonic() - started:.1f} s")
        ask = partial(client.engine_core.call_utility_all_async, "last_pause")
        async with asking(heart, ask, config.engine_timeout):
            await serve_http(app, client, listener, access, args, end, policies)
    if reason := end.result():
        raise RunError(reason)


async def _make_app(
    config: "InferenceConfig",
    args: Namespace,
    base: BaseModel,
    client: "AsyncLLM",
    access: Access,
    nodes: Nodes,
    fail: Callable[[str], None],
) -> "tuple[FastAPI, PolicyServer]":
    """Make vLLM's application with our routes, over engines that know what they have loaded."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    engine = VllmEngine(client, config.kv_on_switch == "recompute", nodes.places)
    await engine.prepare(base.policy, replica_root(config.weights_cache, config.server.port))
    lease = Lease(config.lease_seconds)
    max_rank = config.max_lora_rank if config.enable_lora else None
    policies = PolicyServer(
        engine, base.policy, base.shapes, base.tied, lease, fail, config.canary_tolerance, max_rank, config.pin_seconds
    )
    await policies.start()
    tasks = await client.get_supported_tasks()
    app = build_app(args, tasks, client.model_config)
    await init_app_state(client, app.state, args, tasks)
    names = adapters = None
    if config.enable_lora:
        names = NamesInVllm(app.state.openai_serving_models.lora_requests)
        adapters = NamedAdapters(
            policies,
            engine,
            names,
            base.shapes,
            max_rank=config.max_lora_rank,
            capacity=config.max_loras - 1,
            reserved=args.served_model_name,
            canary_tolerance=config.canary_tolerance,
        )
    prepare_requests(client, policies, names)
    name, why_not = args.served_model_name[0], access.why_not_steered
    app.include_router(make_router(policies, name, why_not, engine.measure, adapters))
    return app, policies


async def _unless_ended(work: Coroutine[Any, Any, _T], end: "asyncio.Future[str | None]") -> _T:
    """Await `work`, or raise RunError as soon as `end` has a reason: a lost node answers nothing, for ever."""
    task: asyncio.Future[_T] = asyncio.ensure_future(work)
    either: set[asyncio.Future[Any]] = {task, end}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if end.done() and (reason := end.result()):
        task.cancel()
        raise RunError(reason)
    return await task


async def serve_http(
    app: "FastAPI",
    client: "AsyncLLM",
    listener: socket.socket,
    access: Access,
    args: Namespace,
    end: "asyncio.Future[str | None]",
    policies: PolicyServer,
) -> None:
    """Serve until `end` has a result: None after SIGINT or SIGTERM, else why the server cannot go on.

    Requests in flight are answered with what they have (finish_reason "abort"), or with an error if the engine is dead.
    """
    from vllm.entrypoints.launchers.launcher import NoSignalServer
    from vllm.v1.engine.exceptions import EngineDeadError

    versioned = PolicyVersionHeader(app, lambda: policies.policy.version)
    guarded = GuardedRequests(PinnedRequests(versioned, policies.pins), access)
    http = NoSignalServer(_http_config(guarded, args))
    app.state.server = http  # where vLLM's error handlers look for it
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _end, end, None)
    for process in client.engine_core.resources.engine_manager.processes:
        loop.add_reader(
            process.sentinel, _end, end, f"{process.name} (pid {process.pid}) died; see its last words above"
        )
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    await asyncio.wait({serving, end}, return_when=asyncio.FIRST_COMPLETED)
    _end(end, "the HTTP server stopped by itself; see its last words above")
    patience = _CLOSE_TIMEOUT_S if end.result() is None else _FAILED_CLOSE_TIMEOUT_S
    http.config.timeout_graceful_shutdown = patience
    http.should_exit = True
    with suppress(EngineDeadError, TimeoutError):
        async with asyncio.timeout(patience):
            await client.pause_generation(mode="abort", clear_cache=False)
    await serving


def _end(end: "asyncio.Future[str | None]", reason: str | None) -> None:
    """The first reason counts; what dies of it gives further ones."""
    if not end.done():
        end.set_result(reason)


def _end_start(signum: int, frame: object) -> None:
    """Unwind, so that an engine which is still starting is ended too."""
    sys.exit(128 + signum)


def _http_config(app: GuardedRequests, args: Namespace) -> uvicorn.Config:
    """What vLLM's own entry point sets of its HTTP server."""
    from vllm import envs
    from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config

    log_config = get_uvicorn_log_config(args)
    return uvicorn.Config(
        app,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers,
        h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
        **({"log_config": log_config} if log_config is not None else {}),
    )
