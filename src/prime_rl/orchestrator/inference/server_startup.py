"""Leases the servers and loads the version that the run starts with, before anything is dispatched (I5).

A new run waits for all servers, or for `min_servers` of them. A run that restarts, or follows a trainer rollback, waits
for one. The others join when they are available (`InferencePool.maintain`).
"""

import asyncio
import itertools
import time
from collections.abc import Sequence

from loguru import logger

from prime_rl.core.daemon_futures import run_in_daemon_thread
from prime_rl.core.errors import RunError
from prime_rl.evaluation.runner import first_exception
from prime_rl.orchestrator.asyncio_utils import deadline_scope
from prime_rl.orchestrator.inference.inference_server import (
    SERVER_ERRORS,
    InferenceServer,
    InvalidWeights,
    PublishedVersion,
    may_recover,
)
from prime_rl.orchestrator.inference.server_settings import UnfitServer
from prime_rl.orchestrator.inference.weight_versions import WeightVersions
from prime_rl.rollouts.clients.inference_client import LoadedPolicy

_PROBE_S = 0.25
_MAX_STARTS = 10
"""A server that is lost this many times while it is set up ends the run."""


async def bring_up(
    servers: Sequence[InferenceServer],
    published: PublishedVersion | None,
    timeout_s: float,
    reconnect_s: float,
    minimum: int,
) -> None:
    """Lease the servers and load a published version, or the base model, on all at the same time.

    It is enough if `minimum` servers answer within `timeout_s`. `reconnect_s` is the longest wait for a server that is
    lost meanwhile. Raises RunError if a server belongs to another run or rejects the version, and UnfitServer if less
    than `minimum` servers have settings that fit the run's.
    """

    async def set_up(server: InferenceServer) -> None:
        await server.wait_until_reachable(timeout_s)
        for start in itertools.count(1):
            try:
                loaded = await server.client.reset()
                if published is not None:
                    async with server.switch_lock:
                        loaded = await server.load(published)
                break
            except SERVER_ERRORS as error:
                if not may_recover(error):
                    raise
                if start == _MAX_STARTS:
                    raise RunError(f"{error}; lost {_MAX_STARTS} times while it was set up") from None
                logger.warning("{}; waiting for the server to restart", error)
                await server.wait_until_reachable(reconnect_s)
        server.version, server.up = loaded.version, True
        logger.info("inference at {} samples from {} ({})", server.client.url, loaded.version, loaded.hash)

    chosen = await _first_reachable(servers, timeout_s, minimum) if minimum < len(servers) else servers
    try:
        async with asyncio.TaskGroup() as tasks:
            for server in chosen:
                tasks.create_task(set_up(server))
    except ExceptionGroup as group:
        raise first_exception(group) from group


async def bring_to_newest(
    servers: Sequence[InferenceServer], publications: WeightVersions, timeout_s: float, reconnect_s: float
) -> int:
    """Lease the servers after a restart, load the newest valid version or the base model, and return its step.

    Raises as `bring_up`, and InvalidWeights if the newest version is invalid and that ends the run.
    """
    silence = RunError(f"{publications.paths.weights_dir} did not answer within {timeout_s:.0f} s")
    while True:
        newest, published = None, None
        try:
            async with deadline_scope(lambda: silence, timeout_s):
                await publications.refresh()
                if (newest := publications.newest) is not None:
                    published = await run_in_daemon_thread(publications.read, newest)
            await bring_up(servers, published, timeout_s, reconnect_s, minimum=1)
            return newest or 0
        except InvalidWeights as error:
            if newest is None:
                raise
            await publications.refuse(newest, error)


async def _first_reachable(servers: Sequence[InferenceServer], timeout_s: float, minimum: int) -> list[InferenceServer]:
    """Wait until `minimum` servers answer; return those that do, or all after the timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        answers = await asyncio.gather(*(server.policy() for server in servers), return_exceptions=True)
        answered = list(zip(servers, answers, strict=True))
        candidates = [server for server, answer in answered if isinstance(answer, LoadedPolicy)]
        unfit = [(server, answer) for server, answer in answered if isinstance(answer, UnfitServer)]
        for server, refusal in unfit:
            if len(servers) - len(unfit) < minimum:
                raise refusal
            server.log_refusal(refusal)
        if len(candidates) >= minimum:
            for server, answer in answered:
                if not isinstance(answer, LoadedPolicy | UnfitServer):
                    logger.warning("inference at {} does not answer; starting without it", server.client.url)
            return candidates
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, UnfitServer) and not may_recover(answer):
                raise answer
        await asyncio.sleep(_PROBE_S)
    return list(servers)
