"""I7: the server's heartbeat. It makes progress as long as its engines answer: one that hangs answers nothing.

A server that was not told the run's directory has none; its clients notice its death by their connections.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from prime_rl.run.heart import Heartbeat
from prime_rl.supervisor.process import is_supervised

if TYPE_CHECKING:
    from prime_rl.configs.inference import InferenceConfig

ROLE = "inference"
_ASK_S = 1.0


@contextmanager
def server_heartbeat(config: "InferenceConfig") -> Iterator[Heartbeat]:
    """Beat while the server starts and runs, if it knows the run's directory; what it gives says nothing otherwise.

    Under `rl` there is one server, `inference`; by hand there may be several, and a name tells node and port.
    """
    name = ROLE if is_supervised() else f"{ROLE}_{socket.gethostname()}_{config.server.port}"
    heart = Heartbeat(config.run_paths, name, ROLE)
    heart.enter("start engines")
    if "output_dir" not in config.model_fields_set:
        yield heart
        return
    with heart:
        yield heart


@asynccontextmanager
async def asking(heart: Heartbeat, ask: Callable[[], Awaitable[Any]], timeout_s: float) -> AsyncIterator[None]:
    """Serve: beat only while this loop turns, and count as stuck if no answer comes for `timeout_s` seconds.

    Args:
        heart: of the server.
        ask: asks all engines something cheap; what it raises ends the questions, and is for others to deal with.
        timeout_s: longest time that the engines may need, in the middle of a step.
    """
    heart.follow(asyncio.get_running_loop())
    heart.enter("serve", timeout_s)
    task = asyncio.create_task(_ask(heart, ask))
    try:
        yield
    finally:
        heart.enter("end")
        heart.follow(None)
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # of an engine that is dead; who watches its process has said so


async def _ask(heart: Heartbeat, ask: Callable[[], Awaitable[Any]]) -> None:
    while True:
        await ask()
        heart.advance()
        await asyncio.sleep(_ASK_S)
