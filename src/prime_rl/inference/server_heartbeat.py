"""The server's heartbeat: it advances as long as the engines answer.

A server without the run's directory writes no heartbeat; its clients notice its end by their connections.
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any

from prime_rl.configs.inference import InferenceConfig
from prime_rl.core.types import PolicyVersion
from prime_rl.liveness.heartbeat_monitor import SERVING
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.parent_process import NODE_VARIABLE, is_supervised

ROLE = "inference"
PAUSE = "pause"
UPDATES = "updates"
_INTERVAL_S = 1.0


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
    writer.enter("start engines")
    with writer if "output_dir" in config.model_fields_set else nullcontext():
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
    writer: HeartbeatWriter, check: Callable[[], Awaitable[Any]], timeout_s: float
) -> AsyncIterator[None]:
    """Write heartbeats of phase "serve" for the length of the block, while the event loop runs.

    They show progress only while `check` returns within `timeout_s` seconds: when all engines have answered and sample.
    An exception ends the polling.
    """

    async def poll() -> None:
        while True:
            await check()
            writer.advance()
            await asyncio.sleep(_INTERVAL_S)

    writer.watch_event_loop(asyncio.get_running_loop())
    writer.enter(SERVING, timeout_s)
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
