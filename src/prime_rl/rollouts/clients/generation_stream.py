"""The client's side of the token stream: one long-lived connection to each server, shared by all rollouts of a process.

Requests of one turn of the event loop are sent in one frame. Those of one prompt are sent as one message, so that the
server prefills the prompt once. Completions are spread over turns of the loop, so that timers and other connections do
not wait for a burst. See `generation_messages` for the protocol.
"""

import asyncio
import itertools
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import msgspec
import numpy as np
from loguru import logger

from prime_rl.core.framing import FrameReader
from prime_rl.core.http_requests import connection_error
from prime_rl.rollouts.clients.generation_messages import (
    ID_BYTES,
    MAX_ANSWER_BYTES,
    MAX_FRAME_BYTES,
    MAX_SAMPLES,
    MAX_SAMPLING_BYTES,
    PATH,
    PROTOCOL,
    ClientFrame,
    Completion,
    SampleRequest,
    decode_server_frame,
    detect_lost_peer,
    encode,
    pack,
    split,
)

HTTP_SECONDS = 60.0
"""For so long after a server answers that it does not offer the stream, it is not asked again."""

_SWITCHING_PROTOCOLS = 101
_ERROR_STATUSES = (401, 403, 408, 425, 429)
"""Statuses below 500 of a server that refuses; all others mean that it does not offer the stream."""
_OWN_FIELDS = {"seed", "logprobs", "routed_experts_prompt_start"}
"""Sampling parameters that a message does not repeat: the seed has its own field, and log-probabilities always come."""
_COMPLETIONS_PER_TURN = 4
"""Completions that rollouts get in one turn of the event loop; each continues a rollout, which takes about 0.5 ms."""
_OPEN_SECONDS = 30.0
"""Timeout of opening the stream."""


class RequestRefused(Exception):
    """The server refused a request or failed to answer it; see `generation_messages.Refusal`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class GenerationStream:
    """The stream to one server; connects at the first request, and again at the first request after a loss.

    Attributes:
        http_until: time (`time.monotonic`) until which requests are sent by HTTP.
    """

    def __init__(self, url: str, model: str, headers: Mapping[str, str]) -> None:
        """Describe the server at a root URL. `headers` are those of every HTTP request, with the API key."""
        self.http_until = 0.0
        self._url = url
        self._model = model
        self._headers = headers
        self._connection: _Connection | None = None
        self._opening: asyncio.Task[_Connection | None] | None = None

    @property
    def is_offered(self) -> bool:
        """Whether to try the stream: the server has not refused it in the last minute."""
        return self.http_until <= time.monotonic()

    async def sample(self, prompt_ids: list[int], sampling: Mapping[str, Any]) -> Completion | None:
        """Sample one completion; cancellation ends it on the server. Returns None if the stream is not offered.

        Raises:
            RequestRefused: by the server.
            ConnectionError: it was lost, or cannot be opened.
            ValueError: the server sent something else than frames.
        """
        if (connection := self._connection) is None or connection.is_lost:
            connection = await self._connect()
        return None if connection is None else await connection.sample(self._model, prompt_ids, sampling)

    async def close(self) -> None:
        """Close the connection; samples in progress end."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        if self._connection is not None:
            self._connection.close()

    async def _connect(self) -> "_Connection | None":
        """Open the connection once for all requests that wait for it."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    def _opened(self, opening: "asyncio.Task[_Connection | None]") -> None:
        self._opening = None
        if not opening.cancelled() and opening.exception() is None:
            self._connection = opening.result()

    async def _open(self) -> "_Connection | None":
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                return await self._shake_hands()
        except TimeoutError:
            message = f"{PATH} did not respond within {_OPEN_SECONDS:g} s"
            raise ConnectionError(message) from None

    async def _shake_hands(self) -> "_Connection | None":
        parts = urlsplit(self._url)
        is_https = parts.scheme == "https"
        fields = {"Host": parts.netloc.rpartition("@")[2], "Connection": "Upgrade", "Upgrade": PROTOCOL}
        lines = [f"GET {parts.path.rstrip('/')}{PATH} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in {**fields, **self._headers}.items()]
        head = "\r\n".join([*lines, "\r\n"]).encode("latin-1")
        port = parts.port or (443 if is_https else 80)
        context = ssl.create_default_context() if is_https else None
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(loop, head), str(parts.hostname), port, ssl=context
            )
        except OSError as error:
            raise connection_error(error) from None
        try:
            status, body = await connection.handshake
        except asyncio.CancelledError:
            connection.close()
            raise
        if status == _SWITCHING_PROTOCOLS:
            return connection
        connection.close()
        if status >= 500 or status in _ERROR_STATUSES:
            raise RequestRefused(status, body.decode(errors="replace"))
        logger.debug("{} answers {} to a request of {}; requests are sent by HTTP", self._url, status, PATH)
        self.http_until = time.monotonic() + HTTP_SECONDS
        return None


class _Connection(asyncio.Protocol):
    """One connection, from the HTTP request that opens the stream to its loss."""

    def __init__(self, loop: asyncio.AbstractEventLoop, head: bytes) -> None:
        self.handshake: asyncio.Future[tuple[int, bytes]] = loop.create_future()
        self.is_lost = False
        self._loop = loop
        self._head = head
        self._answer = bytearray()
        self._reader = FrameReader(MAX_ANSWER_BYTES)
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Completion]] = {}
        self._requests: dict[tuple[bytes, bytes, int], SampleRequest] = {}
        self._aborts: list[int] = []
        self._reason = "the connection was closed"
        self._turns = LoopTurns(_COMPLETIONS_PER_TURN)

    async def sample(self, model: str, prompt_ids: list[int], sampling: Mapping[str, Any]) -> Completion:
        prompt = np.array(prompt_ids, "<i4").tobytes()
        parameters = encode({key: value for key, value in sampling.items() if key not in _OWN_FIELDS})
        if len(prompt) > MAX_FRAME_BYTES // 2:
            raise RequestRefused(413, f"the prompt has {len(prompt_ids)} tokens, too many for one message")
        if len(parameters) > MAX_SAMPLING_BYTES:
            raise RequestRefused(413, f"the sampling parameters have {len(parameters)} bytes, too many for one message")
        if self.is_lost:
            raise ConnectionError(self._reason)
        self._send_soon()
        key = prompt, parameters, sampling.get("routed_experts_prompt_start", 0)
        if (request := self._requests.get(key)) is None:
            request = SampleRequest([], [], model, prompt, msgspec.Raw(parameters), routes_start=key[2])
            self._requests[key] = request
        if len(request.ids) == MAX_SAMPLES:
            raise RequestRefused(413, f"more than {MAX_SAMPLES} samples of one prompt")
        number = next(self._numbers)
        request.ids.append(number)
        request.seeds.append(sampling.get("seed"))
        future = self._pending[number] = self._loop.create_future()
        try:
            return await future
        finally:
            if self._pending.pop(number, None) is not None and not self.is_lost:  # cancelled
                self._send_soon()
                self._aborts.append(number)

    def close(self) -> None:
        self._transport.close()

    def _send_soon(self) -> None:
        if not self._requests and not self._aborts:
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        requests, self._requests = self._requests, {}
        aborts, self._aborts = self._aborts, []
        if self.is_lost:
            return
        for batch in split(requests.values(), _num_bytes):
            self._transport.write(pack(ClientFrame(batch)))
        for numbers in split(aborts, lambda number: ID_BYTES):
            self._transport.write(pack(ClientFrame([], numbers)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        detect_lost_peer(transport)
        self._transport.write(self._head)

    def data_received(self, data: bytes) -> None:
        try:
            if not self.handshake.done():
                self._read_answer(data)
                return
            for frame in self._reader.feed(data):
                self._receive(frame)
        except ValueError as error:
            self._lose(ValueError(f"the token stream has an invalid frame: {error}"))
            self._transport.abort()

    def _read_answer(self, data: bytes) -> None:
        """Read the response to the request that opens the stream. The server sends no frame before the first request.

        Its body is read as far as the length is known: it is only used in a message.
        """
        self._answer += data
        head, end, body = bytes(self._answer).partition(b"\r\n\r\n")
        if not end:
            return
        first, *fields = head.decode("latin-1").split("\r\n")
        status = int(first.split()[1])
        values = dict(field.lower().split(":", 1) for field in fields)
        if status == _SWITCHING_PROTOCOLS or len(body) >= int(values.get("content-length", 0)):
            self.handshake.set_result((status, body))

    def _receive(self, frame: bytes) -> None:
        answer = decode_server_frame(frame)
        for completion in answer.completions:
            if (future := self._pending.pop(completion.id, None)) is not None:
                self._turns.resolve(future, completion)
        for refusal in answer.refusals:
            if (future := self._pending.pop(refusal.id, None)) is not None and not future.done():
                future.set_exception(RequestRefused(refusal.status, refusal.message))
        self._reason = answer.closing or self._reason

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(ConnectionError(str(error or self._reason)))

    def _lose(self, error: Exception) -> None:
        self.is_lost = True
        waiting: list[asyncio.Future[Any]] = [self.handshake, *self._pending.values()]
        self._pending = {}
        for future in waiting:
            if not future.done():
                future.set_exception(error)


def _num_bytes(request: SampleRequest) -> int:
    return len(request.token_ids) + len(request.sampling) + ID_BYTES * len(request.ids)


_T = TypeVar("_T")


class LoopTurns:
    """Sets the results of futures in order, a limited number in each turn of the running event loop."""

    def __init__(self, per_turn: int) -> None:
        """Set at most `per_turn` results in each turn."""
        self._per_turn = per_turn
        self._waiting: deque[Callable[[], None]] = deque()

    def resolve(self, future: "asyncio.Future[_T]", result: _T) -> None:
        """Set the result of a future, in this turn or a later one; nothing if it is done by then."""

        def set_result() -> None:
            if not future.done():
                future.set_result(result)

        self._waiting.append(set_result)
        if len(self._waiting) == 1:
            future.get_loop().call_soon(self._run, future.get_loop())

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(self._per_turn, len(self._waiting))):
            self._waiting[0]()  # it stays in the queue meanwhile, so that `resolve` does not schedule another call
            self._waiting.popleft()
        if self._waiting:
            loop.call_soon(self._run, loop)
