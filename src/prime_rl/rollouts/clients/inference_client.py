"""Client of one inference server: token-in/token-out generation and the policy routes."""

import asyncio
import base64
import errno
import io
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec
import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_rl.configs.sampling import SamplingConfig
from prime_rl.core.errors import RunError
from prime_rl.core.http_requests import connection_error, open_client, request
from prime_rl.core.os_errors import summarize_os_error
from prime_rl.core.retries import Retries, growing_pauses
from prime_rl.core.types import PolicyVersion, Routes
from prime_rl.liveness.run_settings import Setting
from prime_rl.rollouts.clients import generation_messages
from prime_rl.rollouts.clients.generation_stream import GenerationStream, RequestRefused
from prime_rl.rollouts.rendering.messages import Generation

BUSY_STATUSES = (408, 425, 429)
"""HTTP statuses of an overloaded server."""

_RETRIES = 2
"""Retries after a lost connection, which alone does not mean that the server is gone, and after a server fault."""
_RETRY_PAUSE_SECONDS = 0.05
"""Pause before the first retry of a generation; each further pause is four times as long."""
_LOGPROB_TOLERANCE = 1e-3
"""Rounding may leave log-probabilities slightly above 0."""
_LEASE_PROBE_SECONDS = 0.5
_GENERATE = "/inference/v1/generate"
_CONFLICT = 409
_JSON = {"Content-Type": "application/json"}

_T = TypeVar("_T")


class InferenceError(RunError):
    """The inference server refused a request or sent an invalid response; the message contains the server's message.

    Attributes:
        status: of the HTTP response; None if the response was invalid or missing.
        free_in_seconds: other runs hold the server; a lease ends in so many seconds unless its run renews it.
        timed_out: there was no response in time.
    """

    def __init__(
        self, message: str, status: int | None = None, free_in_seconds: float | None = None, timed_out: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.free_in_seconds = free_in_seconds
        self.timed_out = timed_out

    @property
    def is_server_fault(self) -> bool:
        """The server failed, not the request: a retry, or another server, may succeed."""
        return self.status is None or not 400 <= self.status < 500 or self.status in BUSY_STATUSES


class InferenceServerLost(RunError):
    """The inference server cannot be reached."""


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """The policy that a server samples from, and the cost of the switch to it.

    Attributes:
        version: of the weights.
        hash: of the content of the weights.
        is_ours: this run holds the lease of the server.
        stage_s: seconds to read and check the weights, while sampling continued.
        pause_s: seconds for which sampling was paused.
        canary_difference: maximum difference to the trainer's log-probabilities of the version's canary, if any.
        settings: of the server, which must fit those of the run (`run_settings`); empty if it reports none.
    """

    version: PolicyVersion
    hash: str
    is_ours: bool = False
    stage_s: float = 0.0
    pause_s: float = 0.0
    canary_difference: float | None = None
    settings: dict[str, Setting] = field(default_factory=dict)


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _GenerateChoice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_Span]
    finish_reason: str | None = None
    routed_experts: str | None = None


class _GenerateResponse(msgspec.Struct):
    choices: list[_GenerateChoice]


_decode_response = msgspec.json.Decoder(_GenerateResponse).decode


class HttpClient:
    """Connections to one server for requests of rollouts. Use as an async context manager; the first one connects."""

    _session: aiohttp.ClientSession

    def __init__(self, url: str, model: str, api_key: str | None = None, timeout_seconds: float = 1200) -> None:
        self.url = url
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_seconds = timeout_seconds

    async def __aenter__(self) -> Self:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=self._timeout_seconds)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def _post(
        self, url: str, data: bytes, headers: Mapping[str, str] = {}
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Send a JSON body; return the status, the headers and the body of the response."""
        async with self._session.post(url, data=data, headers={**_JSON, **headers}) as response:
            return response.status, response.headers, await response.read()


@contextmanager
def valid_response(url: str) -> Iterator[None]:
    """Raise InferenceError if the block cannot decode the response of `url`."""
    try:
        yield
    except (ValueError, LookupError, OverflowError, RecursionError) as error:
        raise InferenceError(f"{url} returned an invalid response: {error}") from None


class InferenceClient(HttpClient):
    """One inference server. Use as an async context manager."""

    def __init__(
        self,
        url: str,
        model: str,
        run_id: str,
        api_key: str | None = None,
        timeout_seconds: float = 1200,
        probe_seconds: float | None = None,
        vocabulary: int | None = None,
        slot: str | None = None,
    ) -> None:
        """Describe the server at a root URL such as `http://localhost:8000`.

        Args:
            run_id: the run that leases the server to switch its policy.
            probe_seconds: timeout of requests that need no work of the server; None: `timeout_seconds`.
            vocabulary: exclusive upper bound of sampled token ids; None: unknown.
            slot: name of the run's slot, which then stands for `model` in requests; None: the base slot.
        """
        model = slot or model
        super().__init__(url, model, api_key, timeout_seconds)
        self.has_slot, self._slot = slot is not None, {} if slot is None else {"name": slot}
        self._run_id = run_id
        self._vocabulary = vocabulary
        self._probe_seconds = min(probe_seconds or timeout_seconds, timeout_seconds)
        self._stream = GenerationStream(url, model, self._headers)

    async def __aenter__(self) -> Self:
        self._control = open_client({**self._headers, **_JSON})
        return await super().__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await self._stream.close()
        await self._control.aclose()
        await super().__aexit__()

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[Self]:
        """Return this server for one group; its completions name the versions, so nothing delays a switch."""
        yield self

    async def generate(self, prompt_ids: list[int], sampling: Mapping[str, Any]) -> Generation:
        """Sample one completion of `prompt_ids`, the whole context, with vLLM sampling parameters.

        Uses the server's token stream if it offers one, else its HTTP route.

        Raises:
            InferenceServerLost: the server cannot be reached.
            InferenceError: it refused, or its response lacks ids, log-probabilities or version spans, or contains too
                many or unknown tokens. Server faults are retried twice.
        """
        retries = Retries(growing_pauses(_RETRY_PAUSE_SECONDS, _RETRIES))
        while True:
            try:
                generation = await self._stream_generation(prompt_ids, sampling) if self._stream.is_offered else None
                return generation or await self._post_generation(prompt_ids, sampling)
            except InferenceError as error:
                if error.timed_out or not error.is_server_fault or not await retries.pause():
                    raise

    async def _stream_generation(self, prompt_ids: list[int], sampling: Mapping[str, Any]) -> Generation | None:
        """Sample by the token stream; None if the server does not offer it."""
        url = self.url + generation_messages.PATH
        try:
            with valid_response(url):
                answer = await self._repeat_if_lost(lambda: self._stream.sample(prompt_ids, sampling), url)
                if answer is None:
                    return None
                ids, logprobs = np.frombuffer(answer.token_ids, "<i4"), np.frombuffer(answer.logprobs, "<f4")
                max_tokens = sampling.get("max_tokens")
                generation = _generation(
                    ids, logprobs, answer.versions, answer.finish_reason, max_tokens, self._vocabulary, answer.routes
                )
                return _place_routes(generation, len(prompt_ids), sampling)
        except RequestRefused as error:
            message, _ = decode_error(str(error).encode())
            raise InferenceError(f"{url} returned {error.status}: {message}", error.status) from None

    async def _post_generation(self, prompt_ids: list[int], sampling: Mapping[str, Any]) -> Generation:
        body = {"model": self._model, "token_ids": prompt_ids, "sampling_params": {**sampling, "logprobs": 0}}
        url, data = self.url + _GENERATE, msgspec.json.encode(body)
        status, _, raw = await self._repeat_if_lost(lambda: self._post(url, data), url)
        _check_status(url, status, raw)
        with valid_response(url):
            generation = decode_generation(raw, sampling.get("max_tokens"), self._vocabulary)
            return _place_routes(generation, len(prompt_ids), sampling)

    async def policy(self) -> LoadedVersion:
        """Return what the server samples from, and renew the lease if this run holds it.

        Raises:
            InferenceServerLost: the server cannot be reached, or does not respond in time.
            InferenceError: it refuses, or its response is invalid.
        """
        query = urlencode({"run_id": self._run_id, **self._slot})
        return self._loaded(await self._request("GET", f"/policy?{query}", probe=True))

    async def peek_policy(self) -> LoadedVersion:
        """Return what the base slot samples from without renewing a lease; raises the same as `policy`."""
        return self._loaded(await self._request("GET", "/policy", probe=True))

    async def base_canary(self) -> dict[str, Any] | None:
        """Return the log-probabilities of the canary's tokens that the server computed at its start for the base model.

        It has {token_ids, logprobs, dtype}, and `tolerance` if one is configured; it is None if the server has no such
        route. Raises the same as `policy`.
        """
        raw = await self._request("GET", "/base_canary", probe=True, optional=True)
        with valid_response(f"{self.url}/base_canary"):
            return msgspec.json.decode(raw, type=dict[str, Any]) if raw else None

    async def stage(self, weight_dir: str, version: PolicyVersion) -> None:
        """Have the server read and check the published weights in `weight_dir` while it samples from the current ones.

        A server without this route does it in `load`.
        """
        await self._request("POST", "/stage_weights", self._version_body(weight_dir, version), optional=True)

    async def load(self, weight_dir: str, version: PolicyVersion) -> LoadedVersion:
        """Switch to the published weights in `weight_dir`; return when the server samples from them."""
        return self._loaded(await self._request("POST", "/update_weights", self._version_body(weight_dir, version)))

    async def reset(self) -> LoadedVersion:
        """Lease the server for this run and switch to the base model, version 0.

        Waits for the lease of a killed run to expire. Raises if the other run renews its lease meanwhile. Waits for a
        free slot as long as other runs use all of them, but not for named adapters.

        Raises:
            InferenceError: another run holds the server, or named adapters use all of it.
            InferenceServerLost: the server cannot be reached.
        """
        free_in_seconds: float | None = None
        has_logged = False
        while True:
            try:
                body = {"run_id": self._run_id, **self._slot}
                return self._loaded(await self._request("POST", "/reload_weights", body))
            except InferenceError as error:
                if error.free_in_seconds is None:
                    raise
                if self.has_slot and error.status == _CONFLICT and await self._lacks_slot():
                    free_in_seconds = _LEASE_PROBE_SECONDS
                elif free_in_seconds is not None and error.free_in_seconds >= free_in_seconds:
                    raise
                else:
                    free_in_seconds = error.free_in_seconds
                if not has_logged:
                    logger.info("waiting for the lease: {}", error)
                has_logged = True
                await asyncio.sleep(min(_LEASE_PROBE_SECONDS, free_in_seconds))

    async def _lacks_slot(self) -> bool:
        """Return whether the server has not made this run's slot yet."""
        with valid_response(f"{self.url}/policy"):
            answer = msgspec.json.decode(await self._request("GET", "/policy", probe=True), type=dict[str, Any])
            return self._slot["name"] not in [slot["name"] for slot in answer["slots"]]

    async def release(self) -> None:
        """Release this run's lease of the server, or free its slot."""
        await self._request("POST", "/release_policy", {"run_id": self._run_id, **self._slot}, probe=True)

    async def metrics(self) -> str:
        """Return the server's Prometheus metrics."""
        return (await self._request("GET", "/metrics", probe=True)).decode(errors="replace")

    def _version_body(self, weight_dir: str, version: PolicyVersion) -> dict[str, Any]:
        of_version = {"weight_dir": weight_dir, "branch": version.branch, "step": version.step}
        return {**of_version, "run_id": self._run_id, **self._slot}

    def _loaded(self, raw: bytes) -> LoadedVersion:
        with valid_response(f"{self.url}/policy"):
            answer = msgspec.json.decode(raw, type=dict[str, Any])
            version = {"branch": answer["branch"], "step": answer["step"]}
            is_ours = answer.get("run_id") == self._run_id
            return msgspec.convert({**answer, "version": version, "is_ours": is_ours}, LoadedVersion)

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        probe: bool = False,
        optional: bool = False,
    ) -> bytes:
        """Return the body of the response; nothing if the server does not have an `optional` route."""
        url, content = self.url + path, None if body is None else msgspec.json.encode(body)
        send = partial(request, self._control, method, url, content=content)
        response = await self._repeat_if_lost(send, url, probe)
        if optional and response.status_code in (404, 405):
            return b""
        _check_status(url, response.status_code, response.content)
        return response.content

    async def _repeat_if_lost(self, send: Callable[[], Awaitable[_T]], url: str, probe: bool = False) -> _T:
        """Send a request, and again if the connection is lost."""
        seconds, lost = self._probe_seconds if probe else self._timeout_seconds, 0
        outer = sys.exception()
        while True:
            try:
                async with asyncio.timeout(seconds):
                    return await send()
            except TimeoutError:
                did_not = f"did not respond within {seconds:g} s"
                if probe:
                    text = f"inference at {self.url} {did_not} (client.probe_timeout_seconds)"
                    raise InferenceServerLost(text) from None
                raise InferenceError(f"{url} {did_not} (client.timeout_seconds)", timed_out=True) from None
            except (ConnectionError, aiohttp.ClientError) as error:
                reason = connection_error(error, outer)
                if reason.errno in (errno.EMFILE, errno.ENFILE):
                    raise InferenceError(f"cannot connect to {self.url}: {summarize_os_error(reason)}") from None
                self._stream.http_until = 0.0  # another server may listen there now
                lost += 1
                if lost > _RETRIES:
                    text = f"inference at {self.url} cannot be reached: {reason.strerror or reason}"
                    raise InferenceServerLost(text) from None


def _check_status(url: str, status: int, answer: bytes) -> None:
    if status != 200:
        message, free_in_seconds = decode_error(answer)
        raise InferenceError(f"{url} returned {status}: {message}", status, free_in_seconds)


def sampling_parameters(config: SamplingConfig) -> dict[str, Any]:
    """Return the sampling configuration as vLLM parameters, without the seed, which differs per request."""
    parameters = config.model_dump(include={"temperature", "top_p", "top_k", "min_p", "min_tokens"})
    return parameters | ({"max_tokens": config.max_tokens} if config.max_tokens else {})


def decode_generation(response: bytes, max_tokens: int | None, vocabulary: int | None) -> Generation:
    """Return the completion in a JSON response of the HTTP route; raise ValueError or LookupError if it is invalid."""
    choice = _decode_response(response).choices[0]
    ids = np.array(choice.token_ids, np.int32)
    logprobs = np.array([entry.logprob for entry in choice.logprobs.content], np.float32)
    spans = [(span.version, span.start, span.end) for span in choice.weight_versions]
    routes = None
    if choice.routed_experts is not None:
        routes = Routes.of(np.load(io.BytesIO(base64.b64decode(choice.routed_experts)), allow_pickle=False))
    return _generation(ids, logprobs, spans, choice.finish_reason, max_tokens, vocabulary, routes)


def _place_routes(generation: Generation, prompt_length: int, sampling: Mapping[str, Any]) -> Generation:
    """Set the start of the routes, if the server has returned some; ValueError if they are those of other tokens."""
    if generation.routes is None:
        return generation
    start = sampling.get("routed_experts_prompt_start", 0)
    if len(generation.routes.array) != (expected := prompt_length - start + len(generation.token_ids) - 1):
        raise ValueError(f"routes of {generation.routes.shape[0]} tokens, expected {expected}")
    return replace(generation, routes_start=start)


def _generation(
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    spans: Sequence[tuple[str, int, int]],
    finish_reason: str | None,
    max_tokens: int | None,
    vocabulary: int | None,
    routes: Routes | None,
) -> Generation:
    versions = np.full(len(ids), -1, np.int32)
    for version, start, end in spans:
        versions[start:end] = PolicyVersion.parse(version).step
    if not len(ids) or len(logprobs) != len(ids) or (versions < 0).any():
        raise ValueError(f"{len(ids)} ids, {len(logprobs)} logprobs, {(versions >= 0).sum()} versions")
    if max_tokens is not None and len(ids) > max_tokens:
        raise ValueError(f"{len(ids)} tokens, but max_tokens is {max_tokens}")
    if (ids < 0).any() or not (np.isfinite(logprobs).all() and (logprobs <= _LOGPROB_TOLERANCE).all()):
        raise ValueError("a negative token id, or an invalid log-probability")
    if vocabulary is not None and (ids >= vocabulary).any():
        raise ValueError(f"token id {ids.max()}, but the vocabulary has {vocabulary} tokens")
    if finish_reason not in ("stop", "length"):
        raise ValueError(f"finish reason {finish_reason!r}")
    return Generation(ids, logprobs, versions, finish_reason == "length", routes)


def decode_error(data: bytes) -> tuple[str, float | None]:
    """Return the message of an error response on one line, and in how many seconds another run's lease ends."""
    answer: Any = data.decode(errors="replace")
    with suppress(msgspec.DecodeError):
        answer = msgspec.json.decode(data)
    free_in_seconds = None
    if isinstance(answer, dict):
        seconds = answer.get("free_in_s")
        free_in_seconds = float(seconds) if isinstance(seconds, int | float) else None
        error = answer.get("error", answer)
        answer = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(answer).split())[:500], free_in_seconds
