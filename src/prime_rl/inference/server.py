"""Starting vLLM's OpenAI server with a policy that can be switched.

vLLM builds its application, its engine and its HTTP server; this module puts them together as vLLM's own entry point
does, with our routes, our scheduler (`scheduler.make_scheduler`) and our worker extension in place.
"""

import asyncio
import os
import signal
import socket
import time
from argparse import Namespace
from typing import TYPE_CHECKING

from loguru import logger

from prime_rl.errors import ConfigError, RunError
from prime_rl.inference import arguments
from prime_rl.inference.lease import Lease
from prime_rl.inference.model import BaseModel, find_base_model
from prime_rl.inference.policy import PauseMode, PolicyServer
from prime_rl.inference.routes import make_router
from prime_rl.inference.salt import mix
from prime_rl.inference.weights import Policy

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from prime_rl.configs.inference import InferenceConfig


class VllmEngine:
    """`policy.Engine` over vLLM's asynchronous engine."""

    def __init__(self, client: "AsyncLLM") -> None:
        self._client = client
        self._core = client.engine_core

    async def pause(self, mode: PauseMode) -> None:
        """Return when the step in progress is done. The cache is kept: it is divided by policy."""
        await self._core.pause_scheduler_async(mode=mode, clear_cache=False)

    async def load(self, policy: Policy) -> None:
        """Load on all workers."""
        await self._client.collective_rpc("load_policy", args=(str(policy.path),))

    async def commit(self, policy: Policy) -> None:
        """Set the version that the engine attaches to each token, and the salt of what it caches."""
        await self._client.update_weight_version(str(policy.version))
        await self._core.call_utility_async("switch_policy", policy.hash)

    async def resume(self) -> None:
        """Schedule again."""
        await self._client.resume_generation()


def bind(host: str, port: int) -> socket.socket:
    """Bind the server's port, long before there is anything to serve: a port in use is told at once.

    Raises:
        ConfigError: the port is taken, or the address is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"server.port: cannot listen on {host}:{port} ({error.strerror}); set another port") from None
    return listener


def run(config: "InferenceConfig") -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError: the port, the model or an argument of vLLM's is wrong.
        RunError: the engine died, or its weights became undefined.
    """
    started = time.monotonic()
    with bind(config.server.host, config.server.port) as listener:
        base = find_base_model(config.model.name, config.vllm.get("revision"))
        args = _prepare_vllm(config, base)
        asyncio.run(_serve(config, args, base, listener, started))


def _prepare_vllm(config: "InferenceConfig", base: BaseModel) -> Namespace:
    on_cpu = arguments.runs_on_cpu()
    arguments.prepare_environment(config)
    alone = config.parallel.tp * config.parallel.dp == 1
    if on_cpu and alone:
        arguments.prepare_cpu_environment()
    args = arguments.make_arguments(config, base.policy.path, on_cpu)
    if on_cpu and alone:
        from prime_rl.inference import patches

        patches.start_fast_on_cpu()
    return args


async def _serve(
    config: "InferenceConfig", args: Namespace, base: BaseModel, listener: socket.socket, started: float
) -> None:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import serve_http

    api_key = os.environ.get(config.server.api_key_var) or None
    args.api_key = [api_key] if api_key else None
    failures: list[str] = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _interrupt)
    async with build_async_engine_client(args) as client:
        policies = PolicyServer(
            VllmEngine(client), base.policy, base.shapes, base.tied, Lease(config.lease_seconds), _ender(failures)
        )
        await policies.start()
        salt_requests(client, policies)
        tasks = await client.get_supported_tasks()
        app = build_app(args, tasks, client.model_config)
        app.include_router(make_router(policies, args.served_model_name[0], api_key))
        await init_app_state(client, app.state, args, tasks)
        logger.info(f"serving {config.model.name} on port {args.port} after {time.monotonic() - started:.1f} s")
        shutdown = await serve_http(app, sock=listener, **_http_options(args))
        died = client.errored
    await shutdown
    if failures:
        raise RunError(failures[0])
    if died:
        raise RunError("the inference engine died; its last words are above")


def _interrupt() -> None:
    raise KeyboardInterrupt("terminated")


def _ender(failures: list[str]):  # noqa: ANN202
    def end(message: str) -> None:
        logger.error(message)
        failures.append(message)
        signal.raise_signal(signal.SIGTERM)

    return end


def salt_requests(client: "AsyncLLM", policies: PolicyServer) -> None:
    """Salt every request by the loaded weights as it is handed to the engine, whatever route it came by.

    All of them, each child of n > 1 too, pass `add_request_async` last. A switch may still overtake the request on
    its way to prefill; `scheduler` says why the salt is right nevertheless.
    """
    core = client.engine_core
    add_request = core.add_request_async

    async def add_salted(request: "EngineCoreRequest") -> None:
        request.cache_salt = mix(policies.policy.hash, request.cache_salt)
        await add_request(request)

    core.add_request_async = add_salted


def _http_options(args: Namespace) -> dict[str, object]:
    """What vLLM's own entry point passes to its HTTP server."""
    from vllm import envs
    from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config

    log_config = get_uvicorn_log_config(args)
    return {
        "enable_ssl_refresh": args.enable_ssl_refresh,
        "host": args.host,
        "port": args.port,
        "log_level": args.uvicorn_log_level,
        "access_log": not args.disable_uvicorn_access_log,
        "timeout_keep_alive": envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        "ssl_keyfile": args.ssl_keyfile,
        "ssl_certfile": args.ssl_certfile,
        "ssl_ca_certs": args.ssl_ca_certs,
        "ssl_cert_reqs": args.ssl_cert_reqs,
        "ssl_ciphers": args.ssl_ciphers,
        "h11_max_incomplete_event_size": args.h11_max_incomplete_event_size,
        "h11_max_header_count": args.h11_max_header_count,
        **({"log_config": log_config} if log_config is not None else {}),
    }
