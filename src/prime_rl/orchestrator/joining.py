"""I5: before anything is dispatched, servers are leased and sample from the version that the run begins with.

A run that begins waits for all of them. One that goes on, after a restart or because the trainer has gone back, waits
for one: the others may have died long ago, and come in when they are back (`Policy.keep`).
"""

import asyncio
import time
from collections.abc import Sequence

from loguru import logger

from prime_rl.errors import RunError
from prime_rl.orchestrator.engine import EngineError, EngineLost, LoadedPolicy
from prime_rl.orchestrator.server import Published, Server

_PROBE_S = 0.25
_MOST_STARTS = 10
"""How often a server may die while it is brought to the version that the run begins with."""


async def bring_up(
    servers: Sequence[Server], published: Published | None, timeout_s: float, reconnect_s: float, goes_on: bool
) -> None:
    """Lease the servers and bring them to a published version, or to the base model; then they are up.

    Args:
        servers: at least one.
        published: the version; None is the base model.
        timeout_s: longest wait for a server, or for the first of them, to answer.
        reconnect_s: longest wait for one that is lost meanwhile.
        goes_on: one is enough.

    Raises:
        RunError: a server did not answer in time, another run holds it, or it refuses the version.
    """
    for server in await _first_reachable(servers, timeout_s) if goes_on else servers:
        await server.until_reachable(timeout_s)
        loaded = await _bring_to(server, published, reconnect_s)
        server.version, server.up = loaded.version, True
        logger.info("inference at {} samples from {} ({})", server.engine.url, loaded.version, loaded.hash)


async def _first_reachable(servers: Sequence[Server], timeout_s: float) -> list[Server]:
    """Wait until one of them answers; returns those that do, or all if none does in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        answers = await asyncio.gather(*(server.engine.policy() for server in servers), return_exceptions=True)
        if able := [s for s, answer in zip(servers, answers, strict=True) if isinstance(answer, LoadedPolicy)]:
            for server in servers:
                if server not in able:
                    logger.warning("inference at {} does not answer; going on without it", server.engine.url)
            return able
        for answer in answers:
            if isinstance(answer, BaseException) and not _may_come_back(answer):
                raise answer
        await asyncio.sleep(_PROBE_S)
    return list(servers)


async def _bring_to(server: Server, published: Published | None, reconnect_s: float) -> LoadedPolicy:
    for _ in range(_MOST_STARTS):
        try:
            loaded = await server.engine.reset()
            if published is not None:
                async with server.steering:
                    loaded = await server.load(published)
            return loaded
        except (EngineLost, EngineError) as error:
            if not _may_come_back(error):
                raise
            logger.warning("{}; waiting for it to come back", error)
            await server.until_reachable(reconnect_s)
            last = error
    raise RunError(f"{last}; so it went {_MOST_STARTS} times while the server was set up")


def _may_come_back(error: BaseException) -> bool:
    """Tell whether a server is lost or has failed by a fault of its own; another may be started in its place."""
    return isinstance(error, EngineLost) or (isinstance(error, EngineError) and error.is_fault)
