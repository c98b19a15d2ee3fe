"""A minimal HTTP/1.1 server over raw asyncio: bodies with a Content-Length, keep-alive, token streams.

A web framework would need several times the orchestrator's CPU time per request.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.server import ServerState

from prime_rl.inference.generation_stream import Generator, ServerStream
from prime_rl.rollouts.clients.generation_messages import PATH

Write = Callable[[bytes], None]
Answer = Callable[[bytes, bytes, Write], None]
"""Takes the path and the body of a request, and writes the whole response, now or later."""


class Connection(asyncio.Protocol):
    """One connection; without support for pipelined requests. A generator serves token streams."""

    def __init__(self, answer: Answer, generator: Generator | None = None) -> None:
        self._answer = answer
        self._generator = generator
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.WriteTransport) -> None:  # type: ignore[override]
        """Store the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Respond to each complete request."""
        self._buffer += data
        while (head_end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:head_end])
            start = head.lower().find(b"content-length:")
            length = int(head[start + 15 :].split(b"\r\n", 1)[0]) if start >= 0 else 0
            end = head_end + 4 + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[head_end + 4 : end])
            del self._buffer[:end]
            path = head.split(b" ", 2)[1].split(b"?")[0]
            if path == PATH.encode() and self._generator is not None:
                stream = ServerStream(self._generator, ServerState())
                self._transport.set_protocol(stream)
                stream.connection_made(self._transport)
                return
            self._answer(path, body, self._write)

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


def http(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def serve(answer: Answer, generator: Generator | None = None) -> Any:
    """Listen on a free port and print it."""
    server = await asyncio.get_running_loop().create_server(lambda: Connection(answer, generator), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    return server
