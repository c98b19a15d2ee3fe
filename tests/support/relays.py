"""Relays within the test process, some of them faulty, and artifacts for them."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loguru import logger
from starlette.responses import Response

from prime_rl.storage.artifact import publish_artifact
from prime_rl.storage.batch import ROWS_FILE
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.relay.relay_client import RelayClient
from prime_rl.storage.relay.run_files import RunFiles, Writer
from prime_rl_relay.relay_app import RelayAccess, RelayServer, make_relay_app
from prime_rl_relay.run_copier import RunCopier


@dataclass
class RunningRelay:
    """A relay, the requests that it got as (path, value of Range), and what it does to the bytes of files.

    `alter` gets each block of a file; it returns what is sent instead, or None to cut the connection. `index`
    replaces the index, and `respond` the response to any path and range for which it returns one. With `ignores_range`
    files are always sent from their first byte.
    """

    url: str
    requests: list[tuple[str, str]] = field(default_factory=list)
    alter: Callable[[bytes], bytes | None] = lambda block: block
    index: bytes = b""
    ignores_range: bool = False
    respond: Callable[[str, str], Response | None] = lambda path, given: None

    def ranges(self, path: str) -> list[str]:
        """The values of Range of the requests for a file."""
        return [given for found, given in self.requests if found == f"/files/{path}"]


@asynccontextmanager
async def running_relay(root: Path, key: str | None = None) -> AsyncIterator[RunningRelay]:
    """Serve `root` on a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # connections wait until the server accepts them
        relay = RunningRelay(f"http://127.0.0.1:{listener.getsockname()[1]}")
        app = make_relay_app(RunFiles(RunPaths(root)), RelayAccess(key))

        async def recording(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            given = dict(scope["headers"]).get(b"range", b"").decode()
            relay.requests.append((scope["path"], given))
            if relay.ignores_range:
                scope = {**scope, "headers": [one for one in scope["headers"] if one[0] != b"range"]}

            response = Response(relay.index) if relay.index and scope["path"] == "/index" else None
            if (response := response or relay.respond(scope["path"], given)) is not None:
                await response(scope, receive, send)
                return

            async def altered(message: Any) -> None:
                if message["type"] == "http.response.body" and scope["path"].startswith("/files/"):
                    body = relay.alter(message.get("body", b""))
                    if body is None:
                        for _ in range(100):  # a client in this event loop reads what was sent before
                            await asyncio.sleep(0)
                        raise ConnectionAbortedError
                    message = {**message, "body": body}
                await send(message)

            await app(scope, receive, altered)

        server = RelayServer(recording)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield relay
        finally:
            server.should_exit = True
            await serving


@asynccontextmanager
async def copying(target: Path, urls: list[str], writer: Writer) -> AsyncIterator[None]:
    """Copy what `writer` writes from the relays at `urls` to `target`, during the block."""
    async with RelayClient(urls, None) as client:
        task = asyncio.create_task(RunCopier(RunFiles(RunPaths(target)), client, writer, poll_seconds=0.01).run())
        try:
            yield
            assert not task.done(), task.exception()
        finally:
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(outcome, asyncio.CancelledError):
                logger.error("the copying of {} ended: {!r}", target, outcome)


def publish_bytes(root: Path, step: int, content: bytes = b"weights", branch: int = 0, **fields: Any) -> Path:
    """Publish a version with two files; `fields` are of the manifest."""

    def write(directory: Path) -> dict[str, Any]:
        (directory / "model.safetensors").write_bytes(content)
        (directory / "config.json").write_text("{}")
        return {"format": "prime_rl.weights/1", "branch": branch, "step": step, "hash": f"{branch}.{step}", **fields}

    publish_artifact(RunPaths(root).weights(step), write)
    return RunPaths(root).weights(step)


def ship_bytes(root: Path, step: int, branch: int = 0) -> Path:
    """Ship a batch whose rows are not read."""

    def write(directory: Path) -> dict[str, Any]:
        (directory / ROWS_FILE).write_bytes(b"rows of %d.%d" % (branch, step))
        return {"format": "prime_rl.batch/1", "branch": branch, "step": step}

    publish_artifact(RunPaths(root).rollouts(step), write)
    return RunPaths(root).rollouts(step)


def save_part(root: Path, step: int, branch: int = 0) -> Path:
    """Save the orchestrator's part of a checkpoint."""

    def write(directory: Path) -> dict[str, Any]:
        (directory / "state.json").write_text(f'"{branch}.{step}"')
        return {"format": "prime_rl.checkpoint/1", "branch": branch, "step": step}

    target = RunPaths(root).checkpoint(step) / "orchestrator"
    publish_artifact(target, write)
    return target
