"""The server's side of the token stream; `prime_rl.rollouts.clients.generation_messages` defines the protocol.

An HTTP request that opens the stream with the key takes over its connection. Any other request of the path passes the
request layer like all requests: 401 without the key, 426 without the upgrade.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, cast

from loguru import logger
from msgspec.structs import replace
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from prime_rl.core.framing import FrameReader
from prime_rl.inference.request_layer import AccessRules
from prime_rl.rollouts.clients.generation_messages import (
    MAX_FRAME_BYTES,
    MAX_SAMPLING_BYTES,
    PATH,
    PROTOCOL,
    ClientFrame,
    Completion,
    Refusal,
    SampleRequest,
    ServerFrame,
    decode_client_frame,
    detect_lost_peer,
    pack,
    split,
)

MAX_STARTED_BYTES = 256 * 2**20
"""Of the samples of one stream in the engine; above it the others wait."""
MAX_WAITING_BYTES = 64 * 2**20
"""Of the requests that wait; above it no more are read, nor is the loss of the connection seen."""
_STARTED_SAMPLE_BYTES, _WAITING_SAMPLE_BYTES = 4096, 256
"""Memory of a sample, about. In the engine each sample has in addition its own prompt and sampling parameters."""
_SAMPLES_PER_TURN = 64
"""Samples that start in one turn of the event loop; each takes about 0.1 ms."""
_MAX_MESSAGE_LENGTH = 1000
"""Of a refusal; errors of vLLM may repeat the parameters."""

_ACCEPT = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\n\r\n".encode()


class StreamedSample:
    """One completion in progress. The engine's output processor calls `put` with its result.

    Attributes:
        name: the engine's id of the request; empty until the request is registered.
        is_cancelled: the client does not wait for it.
        is_started: it was handed to the engine.
    """

    __slots__ = ("_stream", "id", "is_cancelled", "is_started", "name", "num_bytes")

    def __init__(self, stream: "ServerStream", number: int, num_bytes: int) -> None:
        self.id = number
        self.name = ""
        self.is_cancelled = self.is_started = False
        self.num_bytes = num_bytes
        self._stream = stream

    def put(self, output: Completion | Exception) -> None:
        """Send the completion, or the error in its place, to the client."""
        self._stream.finish(self, output)


class Generator(Protocol):
    """Samples the completions of a stream (`vllm.token_generator`)."""

    async def start(self, request: SampleRequest, samples: Sequence[StreamedSample]) -> None:
        """Start the samples of a request that are not cancelled.

        Raises if it is invalid or the engine is dead; samples that have started, which have a name, then continue.
        """

    async def abort(self, names: Sequence[str]) -> None:
        """Abort the unfinished samples with these names in the engine."""

    def add_load(self, samples: int) -> None:
        """Count samples that begin; those that end are negative."""

    def status_of(self, error: Exception) -> tuple[int, str]:
        """Return the HTTP status and the message of an error."""


class StreamHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which also accepts token streams."""

    def __init__(self, *args: Any, access: AccessRules, generator: Generator, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._access = access
        self._generator = generator

    def _opens_stream(self) -> bool:
        is_idle = self.cycle is None or self.cycle.response_complete
        is_stream = self._get_upgrade() == PROTOCOL.encode() and self.url.partition(b"?")[0] == PATH.encode()
        key = next((value for name, value in self.headers if name == b"authorization"), b"")
        return is_idle and is_stream and self.scope["method"] == "GET" and self._access.allows(key.decode("latin-1"))

    def _should_upgrade(self) -> bool:
        return self._opens_stream() or super()._should_upgrade()

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over; uvicorn calls this for every accepted upgrade."""
        if not self._opens_stream():
            super().handle_websocket_upgrade()
            return
        self.connections.discard(self)
        stream = ServerStream(self._generator, self.server_state)
        self.transport.set_protocol(stream)
        stream.connection_made(self.transport)


class ServerStream(asyncio.Protocol):
    """One open stream. The client's samples end with its connection."""

    def __init__(self, generator: Generator, state: ServerState) -> None:
        self._generator = generator
        self._connections: set[Any] = state.connections  # uvicorn calls their `shutdown` at its end
        self._tasks = state.tasks  # uvicorn waits for them at its end
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._samples: dict[int, StreamedSample] = {}
        self._waiting: deque[tuple[SampleRequest, list[StreamedSample]]] = deque()
        self._is_starting = False
        self._bytes_waiting = self._bytes_started = 0
        self._has_room = asyncio.Event()
        self._completions: list[Completion] = []
        self._refusals: list[Refusal] = []
        self._is_reading = True
        self._is_congested = False
        self._is_closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the stream."""
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        detect_lost_peer(transport)
        self._transport.write(_ACCEPT)

    def data_received(self, data: bytes) -> None:
        """Start the samples that a client sends, and end those that it cancels."""
        if self._transport.is_closing():
            return
        try:
            frames = [decode_client_frame(frame) for frame in self._reader.feed(data)]
            for frame in frames:
                self._accept(frame)
        except (ValueError, RecursionError) as error:
            logger.warning("a token stream is closed: {}", error)
            self._transport.write(pack(ServerFrame(closing=f"the server rejects the stream: {error}")))
            self._transport.close()  # at once only if the client reads
            self._abort(list(self._samples.values()))

    def _accept(self, frame: ClientFrame) -> None:
        self._waiting.extend((request, self._add_samples(request)) for request in frame.requests)
        if self._waiting and not self._is_starting:
            self._is_starting = True
            self._create_task(self._start_waiting())
        self._abort([self._samples[number] for number in set(frame.aborts) if number in self._samples])
        self._update_reading()

    def _add_samples(self, request: SampleRequest) -> list[StreamedSample]:
        ids = set(request.ids)
        if not len(ids) == len(request.ids) == len(request.seeds) or not self._samples.keys().isdisjoint(ids):
            raise ValueError("a request has another number of seeds than of ids, or an id twice")
        num_bytes = _STARTED_SAMPLE_BYTES + _request_bytes(request)
        samples = [StreamedSample(self, number, num_bytes) for number in request.ids]
        self._samples.update(zip(request.ids, samples, strict=True))
        self._bytes_waiting += _waiting_bytes(request)
        self._generator.add_load(len(samples))
        return samples

    async def _start_waiting(self) -> None:
        """Start the waiting samples in parts: pings, aborts and other clients are served between them."""
        num_started = 0
        while self._waiting:
            request, samples = self._waiting.popleft()
            for first in range(0, len(samples), _SAMPLES_PER_TURN):
                part = slice(first, first + _SAMPLES_PER_TURN)
                while self._bytes_started > MAX_STARTED_BYTES:
                    self._has_room.clear()
                    await self._has_room.wait()
                await self._start(replace(request, ids=request.ids[part], seeds=request.seeds[part]), samples[part])
                num_started += len(samples[part])
                if num_started >= _SAMPLES_PER_TURN:
                    num_started = 0
                    await asyncio.sleep(0)
            self._bytes_waiting -= _waiting_bytes(request)
            self._update_reading()
        self._is_starting = False

    async def _start(self, request: SampleRequest, samples: Sequence[StreamedSample]) -> None:
        for sample in samples:
            if not sample.is_cancelled:
                sample.is_started = True
                self._bytes_started += sample.num_bytes
        try:
            if len(request.sampling) > MAX_SAMPLING_BYTES:
                raise ValueError(f"the sampling parameters have more than {MAX_SAMPLING_BYTES} bytes")
            await self._generator.start(request, samples)
        except Exception as error:  # noqa: BLE001  the client gets the reason
            for sample in samples:
                sample.put(error)
            await self._generator.abort([sample.name for sample in samples if sample.name])

    def finish(self, sample: StreamedSample, output: Completion | Exception) -> None:
        """Send the result of a sample, with all others of this turn of the event loop."""
        if self._samples.get(sample.id) is not sample:
            return
        if not self._completions and not self._refusals:
            asyncio.get_running_loop().call_soon(self._send)
        if isinstance(output, Completion):
            self._completions.append(output)
        else:
            status, message = self._generator.status_of(output)
            self._refusals.append(Refusal(sample.id, status, message[:_MAX_MESSAGE_LENGTH]))
        self._remove(sample)

    def _send(self) -> None:
        completions, self._completions = self._completions, []
        refusals, self._refusals = self._refusals, []
        if self._transport.is_closing():
            return
        for batch in split(completions, _num_bytes):
            self._transport.write(pack(ServerFrame(batch)))
        if refusals:
            self._transport.write(pack(ServerFrame(refusals=refusals)))
        self._update_reading()
        if self._is_closing and not self._samples:
            self._transport.close()

    def _remove(self, sample: StreamedSample) -> None:
        del self._samples[sample.id]
        if sample.is_started:
            self._bytes_started -= sample.num_bytes
            self._has_room.set()
        self._generator.add_load(-1)

    def _abort(self, samples: Sequence[StreamedSample]) -> None:
        for sample in samples:
            sample.is_cancelled = True
            self._remove(sample)
        if names := [sample.name for sample in samples if sample.name]:
            self._create_task(self._generator.abort(names))

    def _create_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def connection_lost(self, error: Exception | None) -> None:
        """Abort the unfinished samples of the client that has disconnected."""
        self._connections.discard(self)
        self._abort(list(self._samples.values()))

    def pause_writing(self) -> None:
        """Read no requests while the client does not read its completions."""
        self._is_congested = True
        self._update_reading()

    def resume_writing(self) -> None:
        """Continue to read requests: the client reads its completions again."""
        self._is_congested = False
        self._update_reading()

    def _update_reading(self) -> None:
        is_full = self._bytes_waiting > MAX_WAITING_BYTES
        may_read = not (self._is_congested or self._is_closing or is_full)
        if may_read != self._is_reading and not self._transport.is_closing():
            self._is_reading = may_read
            (self._transport.resume_reading if may_read else self._transport.pause_reading)()

    def shutdown(self) -> None:
        """Close the stream when its samples have ended; uvicorn calls this at its end."""
        self._is_closing = True
        self._update_reading()
        if not self._samples:
            self._send()


def _waiting_bytes(request: SampleRequest) -> int:
    return _request_bytes(request) + _WAITING_SAMPLE_BYTES * len(request.ids)


def _request_bytes(request: SampleRequest) -> int:
    characters = len(request.model) + len(request.cache_salt or "")
    return len(request.token_ids) + len(request.sampling) + 4 * characters  # of Python's widest strings


def _num_bytes(completion: Completion) -> int:
    routes = 0 if completion.routes is None else len(completion.routes.data)
    return len(completion.token_ids) + len(completion.logprobs) + routes + 64
