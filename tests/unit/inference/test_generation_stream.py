"""The token stream between the real client and the real server protocol; only the engine is simulated."""

import asyncio
import itertools
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import numpy as np
import pytest
import uvicorn
import uvloop
from fastapi import FastAPI
from uvicorn.server import ServerState

from prime_rl.core.framing import FrameReader
from prime_rl.core.types import PolicyVersion
from prime_rl.inference import generation_stream
from prime_rl.inference.generation_stream import ServerStream, StreamedSample, StreamHttpProtocol
from prime_rl.inference.request_layer import AccessRules, RequestLayer
from prime_rl.inference.routes import make_router
from prime_rl.rollouts.clients import generation_messages
from prime_rl.rollouts.clients import generation_stream as client_stream
from prime_rl.rollouts.clients.generation_messages import (
    MAX_FRAME_BYTES,
    MAX_SAMPLES,
    MAX_SAMPLING_BYTES,
    PATH,
    ClientFrame,
    Completion,
    SampleRequest,
    ServerFrame,
    decode_client_frame,
    decode_server_frame,
    encode,
    pack,
    split,
)
from prime_rl.rollouts.clients.inference_client import InferenceClient, InferenceError, InferenceServerLost
from tests.support.fake_engine import fake_engine
from tests.support.recording_proxy import recording_proxy

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")


@pytest.fixture
def event_loop_policy():
    """The event loop of all processes that use streams."""
    return uvloop.EventLoopPolicy()


SAMPLING = {"temperature": 1.0, "max_tokens": 4}
NO_KEY = "NO_SUCH_VARIABLE"
NESTED = b"\x91" * 100_000 + b"\x90"


class FakeEngine:
    """A `Generator` whose completion is the prompt's first token and the seed."""

    def __init__(self) -> None:
        self.requests: list[SampleRequest] = []
        self.waiting: list[tuple[StreamedSample, Completion]] = []
        self.aborted: list[str] = []
        self.load = 0
        self.holds = False  # samples wait for `answer_all`
        self.fault: Callable[[SampleRequest], Exception | None] = lambda request: None
        self.change: Callable[[Completion], Completion] = lambda completion: completion
        self.arrived = asyncio.Condition()
        self._numbers = itertools.count()

    async def start(self, request: SampleRequest, samples: Sequence[StreamedSample]) -> None:
        self.requests.append(request)
        if (error := self.fault(request)) is not None:
            raise error
        for sample, seed in zip(samples, request.seeds, strict=True):
            if not sample.is_cancelled:
                sample.name = f"request-{next(self._numbers)}"
                first = np.frombuffer(request.token_ids, "<i4")[0]
                ids = np.array([first, seed or 0], "<i4").tobytes()
                logprobs = np.array([-0.5, -0.25], "<f4").tobytes()
                completion = Completion(sample.id, ids, logprobs, [("0.3", 0, 1), ("0.4", 1, 2)], "stop")
                self.waiting.append((sample, self.change(completion)))
        if not self.holds:
            self.answer_all()
        async with self.arrived:
            self.arrived.notify_all()

    def answer_all(self) -> None:
        waiting, self.waiting = self.waiting, []
        for sample, completion in waiting:
            sample.put(completion)

    async def abort(self, names: Sequence[str]) -> None:
        self.aborted += names
        async with self.arrived:
            self.arrived.notify_all()

    def add_load(self, samples: int) -> None:
        self.load += samples

    def status_of(self, error: Exception) -> tuple[int, str]:
        return (400 if isinstance(error, ValueError) else 500), str(error)

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds after a start or an abort."""
        async with asyncio.timeout(120), self.arrived:
            await self.arrived.wait_for(condition)


class Served:
    """A listening server with a fake engine."""

    def __init__(self, engine: FakeEngine, access: AccessRules) -> None:
        self.engine, self.state = engine, ServerState()
        self.version = PolicyVersion(0, 3)
        app = FastAPI()
        app.include_router(make_router(cast(Any, None), "m", access.admin_refusal))
        layer = RequestLayer(app, access, lambda: self.version)
        config = uvicorn.Config(layer, lifespan="off", log_level="critical")

        def make() -> StreamHttpProtocol:
            return StreamHttpProtocol(config, self.state, {}, access=access, generator=engine)

        self._make = make
        self.port = 0

    async def listen(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(self._make, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def die(self) -> None:
        self._server.close()
        for connection in list(self.state.connections):
            connection.transport.abort() if isinstance(
                connection, StreamHttpProtocol
            ) else self.stream._transport.abort()

    @property
    def stream(self) -> ServerStream:
        [stream] = [each for each in cast("set[Any]", self.state.connections) if isinstance(each, ServerStream)]
        return stream


@asynccontextmanager
async def serving(access: AccessRules | None = None) -> AsyncIterator[Served]:
    served = Served(FakeEngine(), access or AccessRules.for_address(NO_KEY, "127.0.0.1"))
    await served.listen()
    try:
        yield served
    finally:
        served.die()


@asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[tuple[Served, InferenceClient]]:
    async with serving() as served, InferenceClient(served.url, "m", "", **options) as client:
        yield served, client


class RawStream:
    """An opened stream without our client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: bytes) -> None:
        self.reader, self.writer, self.status = reader, writer, status
        self._frames = FrameReader(MAX_FRAME_BYTES)
        self._received: list[bytes] = []

    async def frames(self) -> list[ServerFrame]:
        """All frames until the server closes."""
        async with asyncio.timeout(120):
            return [decode_server_frame(frame) for frame in self._frames.feed(await self.reader.read(-1))]

    async def frame(self) -> ServerFrame:
        async with asyncio.timeout(120):
            while not self._received:
                self._received += self._frames.feed(await self.reader.read(2**16))
        return decode_server_frame(self._received.pop(0))


@asynccontextmanager
async def raw_stream(port: int, key: str = "") -> AsyncIterator[RawStream]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    authorization = f"Authorization: {key}\r\n" if key else ""
    upgrade = f"Connection: Upgrade\r\nUpgrade: {generation_messages.PROTOCOL}\r\n"
    writer.write(f"GET {PATH} HTTP/1.1\r\nHost: a\r\n{upgrade}{authorization}\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    try:
        yield RawStream(reader, writer, head.split()[1])
    finally:
        writer.close()


@asynccontextmanager
async def answering(answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> AsyncIterator[str]:
    """The URL of a server without our code."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def turns(condition: Callable[[], bool] | None = None) -> None:
    """Let the event loop run until a condition holds; without one, for 50 turns."""
    async with asyncio.timeout(120):
        count = 0
        while count < 50 if condition is None else not condition():
            count += 1
            await asyncio.sleep(0)


def request(ids: list[int], token_ids: Sequence[int] = (1, 2)) -> SampleRequest:
    sampling = msgspec.Raw(encode(SAMPLING))
    return SampleRequest(ids, [None] * len(ids), "m", np.array(token_ids, "<i4").tobytes(), sampling)


async def test_generate_returns_tokens_logprobs_and_the_version_of_each_token():
    async with connected() as (served, client):
        generation = await client.generate([7, 8], SAMPLING | {"seed": 5})
    assert generation.token_ids.tolist() == [7, 5]
    assert generation.logprobs.tolist() == [-0.5, -0.25]
    assert generation.versions.tolist() == [3, 4]
    assert not generation.is_truncated
    [sent] = served.engine.requests
    assert (sent.model, np.frombuffer(sent.token_ids, "<i4").tolist(), sent.seeds) == ("m", [7, 8], [5])
    assert msgspec.msgpack.decode(sent.sampling) == SAMPLING


async def test_requests_of_one_turn_share_the_connection_and_one_message_per_prompt():
    async with connected() as (served, client):
        prompts = [[1, 2], [1, 2], [3], [1, 2]]
        samplings = [SAMPLING | {"seed": seed} for seed in range(3)] + [SAMPLING | {"temperature": 0.5}]
        answers = await asyncio.gather(*map(client.generate, prompts, samplings))
        assert len(served.state.connections) == 1
    assert [answer.token_ids.tolist() for answer in answers] == [[1, 0], [1, 1], [3, 2], [1, 0]]
    assert [request.seeds for request in served.engine.requests] == [[0, 1], [2], [None]]


async def test_long_prompts_are_sent_in_several_frames():
    async with connected() as (_, client):
        prompts = [[number] * 150_000 for number in range(4)]
        answers = await asyncio.gather(*(client.generate(prompt, SAMPLING) for prompt in prompts))
        assert [int(answer.token_ids[0]) for answer in answers] == list(range(4))
        with pytest.raises(InferenceError, match="returned 413: the prompt has 9000000 tokens"):
            await client.generate([1] * 9_000_000, SAMPLING)
    assert [len(each) for each in split([400_000] * 5 + [2**21, 1], lambda size: size)] == [2, 2, 1, 1, 1]


async def test_cancelled_request_is_aborted_and_the_others_continue():
    async with connected() as (served, client):
        served.engine.holds = True
        tasks = [asyncio.create_task(client.generate([number], SAMPLING)) for number in range(3)]
        await served.engine.wait(lambda: len(served.engine.waiting) == 3)
        assert served.engine.load == 3
        tasks[1].cancel()
        await served.engine.wait(lambda: bool(served.engine.aborted))
        assert served.engine.aborted == ["request-1"]
        assert served.engine.load == 2
        served.engine.waiting.reverse()
        served.engine.answer_all()  # also the aborted one, whose result is dropped
        assert [int((await task).token_ids[0]) for task in (tasks[0], tasks[2])] == [0, 2]
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        assert served.stream._bytes_started == 0
        assert served.engine.load == 0


async def test_lost_client_aborts_its_samples_only():
    """One sample is cancelled in the frame of its request, and never started."""
    async with connected() as (served, client):
        served.engine.holds = True
        async with raw_stream(served.port) as raw:
            raw.writer.write(pack(ClientFrame([request([0, 1, 2])], [0])))
            await served.engine.wait(lambda: len(served.engine.waiting) == 2)
            task = asyncio.create_task(client.generate([9], SAMPLING))
            await served.engine.wait(lambda: len(served.engine.waiting) == 3)
        await served.engine.wait(lambda: bool(served.engine.aborted))
        assert served.engine.aborted == ["request-0", "request-1"]
        served.engine.answer_all()
        assert (await task).token_ids.tolist() == [9, 0]


async def test_client_timeout_raises_and_aborts():
    async with connected(timeout_seconds=0.1) as (served, client):
        served.engine.holds = True
        with pytest.raises(InferenceError, match=r"did not respond within 0.1 s \(client\.timeout_seconds\)") as caught:
            await client.generate([1], SAMPLING)
        assert caught.value.timed_out
        await served.engine.wait(lambda: bool(served.engine.aborted))
        assert len(served.engine.requests) == 1


@pytest.mark.parametrize(("error", "status", "tries"), [(ValueError("no"), 400, 1), (RuntimeError("dead"), 500, 3)])
async def test_refusal_raises_the_error_of_the_http_route(error, status, tries):
    async with connected() as (served, client):
        served.engine.fault = lambda request: error
        with pytest.raises(InferenceError, match=f"{PATH} returned {status}: {error}") as caught:
            await client.generate([1], SAMPLING)
        assert caught.value.status == status
        assert len(served.engine.requests) == tries
        served.engine.fault = lambda request: None
        assert (await client.generate([1], SAMPLING)).token_ids.tolist() == [1, 0]


async def test_samples_that_started_before_a_failure_are_aborted_and_refused():
    async with connected() as (served, client):
        served.engine.holds = True

        async def fail(self: FakeEngine, request: SampleRequest, samples: Sequence[StreamedSample]) -> None:
            samples[0].name = "request-0"
            raise ValueError("the second sample is invalid")

        served.engine.start = fail.__get__(served.engine)
        group = [client.generate([1], SAMPLING | {"seed": seed}) for seed in range(2)]
        errors = await asyncio.gather(*group, return_exceptions=True)
        assert [error.status for error in errors if isinstance(error, InferenceError)] == [400, 400]
        await served.engine.wait(lambda: bool(served.engine.aborted))
        assert served.engine.aborted == ["request-0"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_ids": b"123"}, "buffer size"),
        ({"logprobs": b"1234"}, "2 ids, 1 logprobs"),
        ({"versions": [("0.1", 0, 1)]}, "1 versions"),
        ({"finish_reason": "abort"}, "abort"),
        ({"token_ids": np.array([1, 200], "<i4").tobytes()}, "token id 200"),
    ],
)
async def test_invalid_completion_is_repeated_and_then_raises(change, said):
    async with connected(vocabulary=128) as (served, client):
        served.engine.change = lambda completion: msgspec.structs.replace(completion, **change)
        with pytest.raises(InferenceError, match=f"returned an invalid response: .*{said}") as caught:
            await client.generate([1], SAMPLING)
        assert caught.value.is_server_fault
        assert len(served.engine.requests) == 3


@pytest.mark.parametrize(
    "data",
    [
        pack(ServerFrame())[:4] + b"\xc1" * 20,
        (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        pack(ClientFrame([request([0, 0])])),
        pack(ClientFrame([msgspec.structs.replace(request([0, 1]), seeds=[1])])),
        pack(ClientFrame([request([0]), request([0])])),
        pack(ClientFrame([request([5])])),
        pack(ClientFrame([request([])])),
        pack(ClientFrame([request(list(range(6, MAX_SAMPLES + 7)))])),
        pack(ClientFrame([request([number]) for number in range(6, MAX_SAMPLES + 7)])),
        pack(ClientFrame([], list(range(MAX_SAMPLES + 1)))),
        pack(ClientFrame([msgspec.structs.replace(request([0]), model="m" * 5000)])),
        pack(ClientFrame([msgspec.structs.replace(request([0]), cache_salt="m" * 5000)])),
        pack(ClientFrame([msgspec.structs.replace(request([0]), sampling=msgspec.Raw(NESTED))])),
        len(NESTED).to_bytes(4, "big") + NESTED,
    ],
    ids=["malformed", "oversize", "one id twice", "seeds", "two requests", "in progress", "no ids", "ids", "requests",
         "aborts", "model", "salt", "nested parameters", "nested frame"],
)  # fmt: skip
async def test_invalid_frame_closes_the_stream_with_the_reason(data):
    async with serving() as served, raw_stream(served.port) as raw:
        served.engine.holds = True
        raw.writer.write(pack(ClientFrame([request([5])])))
        await served.engine.wait(lambda: len(served.engine.waiting) == 1)
        raw.writer.write(data)
        frame = (await raw.frames())[-1]
        assert frame.closing.startswith("the server rejects the stream: ")
        await served.engine.wait(lambda: bool(served.engine.aborted))
        assert not served.state.connections


async def test_death_of_the_server_raises_server_lost_and_its_restart_is_found():
    async with connected() as (served, client):
        served.engine.holds = True
        tasks = [asyncio.create_task(client.generate([number], SAMPLING)) for number in range(4)]
        await served.engine.wait(lambda: len(served.engine.waiting) == 4)
        served.die()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, InferenceServerLost)
            assert f"inference at {served.url} cannot be reached" in str(error)
        served.engine.holds = False
        await served.listen()
        assert (await client.generate([6], SAMPLING)).token_ids.tolist() == [6, 0]


async def test_lost_connection_is_repeated_on_a_new_one():
    async with connected() as (served, client):
        served.engine.holds = True
        task = asyncio.create_task(client.generate([6], SAMPLING))
        await served.engine.wait(lambda: len(served.engine.waiting) == 1)
        served.engine.holds = False
        served.stream._transport.abort()
        assert (await task).token_ids.tolist() == [6, 0]
        assert served.engine.aborted == ["request-0"]


async def test_server_that_ends_sends_the_results_in_progress_and_then_closes():
    async with serving() as served, raw_stream(served.port) as raw, raw_stream(served.port) as idle:
        served.engine.holds = True
        raw.writer.write(pack(ClientFrame([request([5])])))
        await served.engine.wait(lambda: len(served.engine.waiting) == 1)
        for connection in list(served.state.connections):
            connection.shutdown()
        assert await idle.frames() == []
        served.engine.answer_all()
        [frame] = await raw.frames()
        assert [completion.id for completion in frame.completions] == [5]


async def test_stream_is_accepted_with_the_key_only():
    async with serving(AccessRules("secret", is_remote=True, variable="V")) as served:
        for key in ("", "Bearer", "Bearer other", "Basic secret", "secret"):
            async with raw_stream(served.port, key) as raw:
                assert raw.status == b"401"
        for wrong in (None, "other"):
            async with InferenceClient(served.url, "m", "", wrong) as client:
                with pytest.raises(InferenceError, match="returned 401: this server needs its API key") as caught:
                    await client.generate([1], SAMPLING)
            assert caught.value.status == 401
        assert not served.engine.requests
        async with InferenceClient(served.url, "m", "", "secret") as client:
            assert (await client.generate([1], SAMPLING)).token_ids.tolist() == [1, 0]
        assert len(served.engine.requests) == 1


@pytest.mark.parametrize(
    ("method", "path", "upgrade", "status"),
    [
        ("GET", PATH, "", 426),
        ("GET", PATH, "h2c", 426),
        ("POST", PATH, generation_messages.PROTOCOL, 405),
        ("GET", "/inference/v1/streams", generation_messages.PROTOCOL, 404),
    ],
)
async def test_other_requests_open_no_stream(method, path, upgrade, status):
    headers = {"Connection": "Upgrade", "Upgrade": upgrade} if upgrade else {}
    async with serving() as served, httpx.AsyncClient(base_url=served.url) as client:
        answer = await client.request(method, path, headers=headers)
        offered = generation_messages.PROTOCOL if status == 426 else None
        assert (answer.status_code, answer.headers.get("upgrade")) == (status, offered)
        assert answer.headers["x-policy-version"] == "0.3", "it passed the request layer"


async def test_server_without_the_route_is_used_by_http_for_a_minute(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(client_stream, "time", SimpleNamespace(monotonic=lambda: now))
    async with (
        fake_engine() as old,
        serving() as new,
        recording_proxy(old.url) as proxy,
        InferenceClient(proxy.url, "m", "") as client,
    ):
        generations = await asyncio.gather(*(client.generate([1], SAMPLING) for _ in range(3)))
        assert [generation.token_ids.tolist() for generation in generations] == [[20, 21, 22, 23]] * 3
        proxy.target = new.url
        now += 59
        await client.generate([1], SAMPLING)
        assert len(old.requests) == 4, "by the connection that is open"
        now += 2
        assert (await client.generate([1], SAMPLING | {"seed": 5})).token_ids.tolist() == [1, 5]
    assert (len(old.requests), proxy.streams) == (4, 1)


async def test_stream_is_tried_again_after_a_connection_of_http_is_lost():
    async with (
        fake_engine() as old,
        serving() as new,
        recording_proxy(old.url) as proxy,
        InferenceClient(proxy.url, "m", "") as client,
    ):
        await client.generate([1], SAMPLING)
        proxy.target = new.url
        await old.die()
        with pytest.raises(InferenceError, match="404"):  # sent by HTTP, which this server lacks
            await client.generate([1], SAMPLING)
        assert (await client.generate([1], SAMPLING | {"seed": 5})).token_ids.tolist() == [1, 5]


@pytest.mark.parametrize(("status", "tries"), [(503, 3), (429, 3), (403, 1), (400, 0), (404, 0), (200, 0)])
async def test_only_an_answer_that_offers_no_stream_leads_to_http(status, tries):
    requests = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        requests.append(line.split()[1].decode())
        head = await reader.readuntil(b"\r\n\r\n")
        length = [int(each.split(b":")[1]) for each in head.lower().splitlines() if each.startswith(b"content-length")]
        await reader.readexactly(sum(length))
        body = b'{"error": "busy"}'
        code = status if requests[-1] == PATH else 418
        writer.write(f"HTTP/1.1 {code} X\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        writer.close()

    async with answering(answer) as url, InferenceClient(url, "m", "") as client:
        with pytest.raises(InferenceError, match="busy") as caught:
            await client.generate([1], SAMPLING)
    assert caught.value.status == (status if tries else 418)
    assert requests == ([PATH] * tries or [PATH, "/inference/v1/generate"])


async def test_no_requests_are_read_above_the_limit_of_bytes(monkeypatch):
    monkeypatch.setattr(generation_stream, "MAX_STARTED_BYTES", 2**20)
    monkeypatch.setattr(generation_stream, "MAX_WAITING_BYTES", 2**20)
    async with connected() as (served, client):
        served.engine.holds = True
        long = [asyncio.create_task(client.generate([number] * 200_000, SAMPLING)) for number in range(4)]
        await served.engine.wait(lambda: len(served.engine.waiting) == 2)
        await turns(lambda: not served.stream._is_reading)
        await turns()
        assert len(served.engine.requests) == 2
        served.engine.holds = False
        served.engine.answer_all()
        assert [int((await task).token_ids[0]) for task in long] == list(range(4))
        assert served.stream._is_reading and served.stream._bytes_waiting == 0


@pytest.mark.parametrize("field", ["model", "cache_salt"])
async def test_names_and_salts_of_requests_count_as_their_bytes(field, monkeypatch):
    monkeypatch.setattr(generation_stream, "MAX_STARTED_BYTES", 2**10)
    monkeypatch.setattr(generation_stream, "MAX_WAITING_BYTES", 2**16)
    async with serving() as served, raw_stream(served.port) as raw:
        served.engine.holds = True
        wide = [msgspec.structs.replace(request([number]), **{field: "\U0001f600" * 4096}) for number in range(8)]
        raw.writer.write(pack(ClientFrame(wide)))
        await turns(lambda: not served.stream._is_reading)
        await served.engine.wait(lambda: len(served.engine.waiting) == 1)
        assert served.stream._bytes_waiting > 7 * 2**14 and served.stream._bytes_started > 2**14


async def test_no_requests_are_read_while_the_client_reads_no_completions():
    large = np.zeros(500_000, "<i4").tobytes()
    async with serving() as served, raw_stream(served.port) as raw:
        raw.writer.transport.pause_reading()
        served.engine.change = lambda completion: msgspec.structs.replace(completion, token_ids=large)
        for number in range(20):
            raw.writer.write(pack(ClientFrame([request([number])])))
        await served.engine.wait(lambda: len(served.engine.requests) == 20)
        await turns(lambda: not served.stream._is_reading)
        raw.writer.write(pack(ClientFrame([request([20])])))
        await turns()
        assert len(served.engine.requests) == 20
        raw.writer.transport.resume_reading()
        received = 0
        while received < 21:
            received += len((await raw.frame()).completions)
        assert served.stream._is_reading


async def test_samples_of_one_frame_start_in_turns_of_the_event_loop():
    async with serving() as served, raw_stream(served.port) as raw:
        counts: list[int] = []

        def is_started() -> bool:
            counts.append(len(served.engine.requests))
            return len(served.engine.waiting) == 4096

        served.engine.holds = True
        raw.writer.write(pack(ClientFrame([request(list(range(2048))), request(list(range(2048, 4096)))])))
        await turns(is_started)
        assert max(np.diff(counts)) <= 1, "requests of at most 64 samples"
        assert max(len(each.ids) for each in served.engine.requests) == 64
        raw.writer.write(pack(ClientFrame([], [*range(4096), 3, 3])))
        await served.engine.wait(lambda: len(served.engine.aborted) == 4096)
        assert served.engine.load == 0 == served.stream._bytes_waiting == served.stream._bytes_started


async def test_samples_that_wait_for_room_start_later_or_end_with_their_connection(monkeypatch):
    monkeypatch.setattr(generation_stream, "MAX_STARTED_BYTES", 2**10)
    async with serving() as served, raw_stream(served.port) as raw:
        served.engine.holds = True
        raw.writer.write(pack(ClientFrame([request(list(range(1000)))])))
        received = 0
        while received < 640:
            await served.engine.wait(lambda: bool(served.engine.waiting))
            await turns()
            assert len(served.engine.waiting) == 64
            served.engine.answer_all()
            received += len((await raw.frame()).completions)
        await served.engine.wait(lambda: bool(served.engine.waiting))
        raw.writer.close()
        await served.engine.wait(lambda: len(served.engine.aborted) == 64)
        await turns(lambda: not (served.state.tasks or served.state.connections))
        assert (len(served.engine.waiting), served.engine.load) == (64, 0)


async def test_request_with_long_sampling_parameters_is_refused_alone_with_a_short_message():
    long = SAMPLING | {"stop": ["x" * MAX_SAMPLING_BYTES]}
    async with connected() as (_, client):
        with pytest.raises(InferenceError, match="too many for one message") as caught:
            await client.generate([1], long)
        assert caught.value.status == 413
    async with serving() as served, raw_stream(served.port) as raw:
        large = msgspec.structs.replace(request([0]), sampling=msgspec.Raw(encode(long)))
        raw.writer.write(pack(ClientFrame([large, request([1])])))
        ended: list[Any] = []
        while len(ended) < 2:
            frame = await raw.frame()
            ended += [*frame.completions, *frame.refusals]
        assert {each.id: type(each).__name__ for each in ended} == {0: "Refusal", 1: "Completion"}
        assert len(served.engine.requests) == 1
        served.engine.fault = lambda request: ValueError("x" * 100_000)
        raw.writer.write(pack(ClientFrame([request([2])])))
        [refusal] = (await raw.frame()).refusals
        assert len(refusal.message) == 1000


def test_decoding_of_too_many_ids_takes_little_memory():
    body = pack(ClientFrame([request(list(range(128)) * 100) for _ in range(200)]))[4:]
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than 16384 samples"):
            decode_client_frame(body)
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()


async def test_server_that_does_not_answer_the_handshake_is_lost(monkeypatch):
    monkeypatch.setattr(client_stream, "_OPEN_SECONDS", 0.1)
    async with answering(lambda reader, writer: reader.read(-1)) as url, InferenceClient(url, "m", "") as client:
        with pytest.raises(InferenceServerLost, match=r"did not respond within 0\.1 s"):
            await client.generate([1], SAMPLING)


async def test_invalid_frame_of_a_server_raises():
    """A server that lies is never believed (I7)."""

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(generation_stream._ACCEPT)
        await reader.read(1)
        writer.write(b"\x00\x00\x00\x02\xc1\xc1")
        await reader.read(-1)
        writer.close()

    async with answering(lie) as url, InferenceClient(url, "m", "") as client:
        with pytest.raises(InferenceError, match="returned an invalid response: the token stream has an invalid frame"):
            await client.generate([1], SAMPLING)


async def test_rejected_stream_of_a_client_that_does_not_read_ends_its_samples_and_takes_no_more():
    async with serving() as served, raw_stream(served.port) as raw:
        raw.writer.transport.pause_reading()
        large = np.zeros(4_000_000, "<i4").tobytes()
        served.engine.change = lambda completion: msgspec.structs.replace(completion, token_ids=large)
        raw.writer.write(pack(ClientFrame([request([0])])))
        await served.engine.wait(lambda: len(served.engine.requests) == 1)
        stream, served.engine.holds = served.stream, True
        stream.data_received(pack(ClientFrame([request([1])])))
        await served.engine.wait(lambda: len(served.engine.waiting) == 1)
        stream.data_received(pack(ClientFrame([request([])])))
        await served.engine.wait(lambda: served.engine.aborted == ["request-1"])
        stream.data_received(pack(ClientFrame([request([2])])))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(served.engine.requests) == 2 and served.engine.load == 0


async def test_both_ends_detect_a_lost_machine():
    async with connected() as (served, client):
        await client.generate([1], SAMPLING)
        connection = client._stream._connection
        assert connection is not None
        for transport in (connection._transport, served.stream._transport):
            end = transport.get_extra_info("socket")
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, interval, count = (
                end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
            )
            assert idle + interval * count <= 60
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
