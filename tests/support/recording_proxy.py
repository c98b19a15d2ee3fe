"""A proxy of an inference server that records completions, and the times of other requests."""

import asyncio
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import msgspec
import numpy as np

from prime_rl.core.framing import FrameReader
from prime_rl.rollouts.clients.generation_messages import (
    MAX_FRAME_BYTES,
    PATH,
    Completion,
    decode_client_frame,
    decode_server_frame,
)

_GENERATE = "/inference/v1/generate"


class RecordingProxy:
    """Forwards requests and token streams to one server, byte for byte.

    Attributes:
        url: URL of the proxy.
        choices: prompt ids and the engine's choice of each completion, as the HTTP route returns it.
        calls: (path, time of the request, time of the response) of all other requests, `time.monotonic`.
        target: URL of the server that new connections are forwarded to.
        streams: number of token streams that the server accepted.
        offers_streams: whether requests to open a stream reach the server; otherwise they are answered with 404.
    """

    def __init__(self, target: str, offers_streams: bool = True) -> None:
        self.url = ""
        self.choices: list[tuple[list[int], dict]] = []
        self.calls: list[tuple[str, float, float]] = []
        self.streams = 0
        self.offers_streams = offers_streams
        self.target = target
        self._open: set[asyncio.StreamWriter] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection of a client."""
        target = urlsplit(self.target)
        upstream, server = await asyncio.open_connection(target.hostname, target.port)
        self._open |= {writer, server}
        try:
            while True:
                head, body = await _read_message(reader)
                path, received = head.split()[1].decode().partition("?")[0], time.monotonic()
                if path == PATH and not self.offers_streams:
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    continue
                server.write(head + body)
                answer_head, answer = await _read_message(upstream)
                writer.write(answer_head + answer)
                status = int(answer_head.split()[1])
                if status == 101:
                    await self._forward_stream(reader, writer, upstream, server)
                elif path == _GENERATE and status == 200:
                    choice = msgspec.json.decode(answer)["choices"][0]
                    self.choices.append((msgspec.json.decode(body)["token_ids"], choice))
                else:
                    self.calls.append((path, received, time.monotonic()))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # one side has closed
        finally:
            for each in (writer, server):
                self._open.discard(each)
                each.close()

    async def _forward_stream(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        upstream: asyncio.StreamReader,
        server: asyncio.StreamWriter,
    ) -> None:
        """Forward both directions until one side closes, and record the frames."""
        self.streams += 1
        prompts: dict[int, list[int]] = {}

        def record_requests(frame: bytes) -> None:
            for request in decode_client_frame(frame).requests:
                prompts.update(dict.fromkeys(request.ids, np.frombuffer(request.token_ids, "<i4").tolist()))

        def record_completions(frame: bytes) -> None:
            for completion in decode_server_frame(frame).completions:
                self.choices.append((prompts.pop(completion.id), _choice(completion)))

        ways = _forward(reader, server, record_requests), _forward(upstream, writer, record_completions)
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        raise ConnectionError("the stream has ended")

    def close(self) -> None:
        """Close all connections."""
        for writer in self._open:
            writer.close()


async def _read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return head and body of a request or response whose length is in its head."""
    head = await reader.readuntil(b"\r\n\r\n")
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:-2])
    assert b"transfer-encoding" not in fields, head
    return head, await reader.readexactly(int(fields.get(b"content-length", 0)))


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: Callable[[bytes], None]) -> None:
    frames = FrameReader(MAX_FRAME_BYTES)
    while data := await reader.read(2**16):
        for frame in frames.feed(data):
            record(frame)
        writer.write(data)
        await writer.drain()


def _choice(completion: Completion) -> dict:
    """A completion of a stream in the form of the HTTP route."""
    ids = np.frombuffer(completion.token_ids, "<i4").tolist()
    logprobs = np.frombuffer(completion.logprobs, "<f4").tolist()
    content = [{"token_id": token, "logprob": value} for token, value in zip(ids, logprobs, strict=True)]
    spans = [{"version": version, "start": start, "end": end} for version, start, end in completion.versions]
    return {
        "token_ids": ids,
        "logprobs": {"content": content},
        "weight_versions": spans,
        "finish_reason": completion.finish_reason,
    }


@asynccontextmanager
async def recording_proxy(target: str, offers_streams: bool = True):
    """Start a proxy of the server at `target`."""
    proxy = RecordingProxy(target, offers_streams)
    listener = await asyncio.start_server(proxy.handle, "127.0.0.1", 0, limit=2**30)
    proxy.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        listener.close()
        proxy.close()
