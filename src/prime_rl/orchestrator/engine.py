"""HTTP client of one inference server: token-in/token-out generation and the policy routes.

I5: which version sampled a token is what the engine reports of that token, never inferred from clocks.
I7: every request has a deadline; what a server answers is checked before anybody uses it. A fault of the server's own
(5xx, an answer that is not understood) is asked for again a few times, and is then its caller's to count.
"""

import asyncio
import errno
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import msgspec
import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_rl.configs.shared import SamplingConfig
from prime_rl.errors import RunError
from prime_rl.run.surroundings import describe
from prime_rl.types import PolicyVersion

_RETRIES = 2
"""A reset connection loses the request but says nothing of the server: try again before giving up on it."""
_PAUSE_S = 0.05
"""Before a completion is asked for again that the server failed to give; four times as long before the next."""
_BUSY = (408, 425, 429)
_POSITIVE = 1e-3
"""What rounding may leave of a log-probability above 0."""
_LEASE_PROBE_S = 0.5


class EngineError(RunError):
    """The inference server refused a request or answered what is not understood; the message holds its words.

    Attributes:
        status: of the HTTP answer; None where what was answered is not understood, or nothing was.
        free_in_s: another run holds the server, which is free after so many seconds unless that run calls again.
        late: nothing was answered in time.
    """

    def __init__(
        self, message: str, status: int | None = None, free_in_s: float | None = None, late: bool = False
    ) -> None:
        """Take the message, the status of the answer if there was one, and what it says of another run's lease."""
        super().__init__(message)
        self.status = status
        self.free_in_s = free_in_s
        self.late = late

    @property
    def is_fault(self) -> bool:
        """The server has failed, and not the request: it may go well another time, or elsewhere."""
        return self.status is None or self.status >= 500 or self.status in _BUSY


class EngineLost(RunError):
    """The inference server cannot be reached."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled completion of T tokens.

    Attributes:
        token_ids: int32 [T].
        logprobs: float32 [T], of the sampled tokens, temperature applied.
        versions: int32 [T], step of the policy version that sampled each token, as the engine reports it.
        is_truncated: ended by `max_tokens`.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    is_truncated: bool


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """What a server samples from: the version, the content hash of its weights, and what the switch cost.

    Attributes:
        version: of the weights.
        hash: of their content.
        is_ours: the server is leased by the run that asked.
        stage_s: how long the weights were read and checked while sampling went on, seconds.
        pause_s: how long sampling stood still, seconds.
        load_s: how much of that the weights took, seconds.
        canary_difference: largest difference to the trainer's log-probabilities of the version's canary, if it has one.
    """

    version: PolicyVersion
    hash: str
    is_ours: bool = False
    stage_s: float = 0.0
    pause_s: float = 0.0
    load_s: float = 0.0
    canary_difference: float | None = None


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_Span]
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _Loaded(msgspec.Struct):
    branch: int
    step: int
    hash: str
    run_id: str | None = None
    stage_s: float = 0.0
    pause_s: float = 0.0
    load_s: float = 0.0
    canary_difference: float | None = None


_LOADED = msgspec.json.Decoder(_Loaded)


class Engine:
    """One inference server. Use as an async context manager."""

    def __init__(
        self,
        url: str,
        model: str,
        run_id: str,
        api_key: str | None = None,
        timeout_s: float = 1200,
        probe_s: float | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """Prepare a client; nothing is sent before the first call.

        Args:
            url: root of the server, e.g. `http://localhost:8000`.
            model: name that the server serves.
            run_id: the run in whose name the policy is switched; the server is leased by it.
            api_key: sent as bearer token if given.
            timeout_s: longest time for one request, seconds.
            probe_s: longest time for an answer that the server need not work for; None is `timeout_s`.
            vocabulary: token ids of completions lie below it; None is not known.
        """
        self.url = url
        self._model = model
        self._run_id = run_id
        self._vocabulary = vocabulary
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._probe = aiohttp.ClientTimeout(total=min(probe_s or timeout_s, timeout_s))
        self._session: aiohttp.ClientSession | None = None
        self._decoder = msgspec.json.Decoder(_Answer)

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, prompt_ids: list[int], sampling: Mapping[str, Any]) -> Generation:
        """Sample one completion of `prompt_ids`.

        Args:
            prompt_ids: token ids of the whole context.
            sampling: vLLM sampling parameters (max_tokens, temperature ...).

        Raises:
            EngineLost: the server cannot be reached.
            EngineError: it refused, or its answer lacks ids, log-probabilities or version spans, has more than was
                asked for, or tokens that the model does not know; a fault of the server's was asked for again twice.
        """
        body = {"model": self._model, "token_ids": prompt_ids, "sampling_params": {**sampling, "logprobs": 0}}
        for attempt in itertools.count():
            try:
                raw = await self._request("POST", "/inference/v1/generate", body)
                return self._understood(raw, sampling.get("max_tokens"))
            except EngineError as error:
                if attempt == _RETRIES or error.late or not error.is_fault:
                    raise
            await asyncio.sleep(_PAUSE_S * 4**attempt)
        raise AssertionError("unreachable")

    async def policy(self) -> LoadedPolicy:
        """Ask what the server samples from; renews the lease if this run holds it.

        Raises:
            EngineLost: it cannot be reached, or does not answer in time.
            EngineError: it refuses, or answers what is not understood.
        """
        return self._loaded(await self._request("GET", f"/policy?run_id={self._run_id}", probe=True))

    async def look(self) -> LoadedPolicy:
        """Ask what the server samples from, in nobody's name; raises as `policy`."""
        return self._loaded(await self._request("GET", "/policy", probe=True))

    async def stage(self, weight_dir: str, version: PolicyVersion) -> None:
        """Have the published weights in `weight_dir` read and checked, so that `load` has little left to do.

        Sampling goes on, and nothing is switched. A server without the route does all of it in `load`.
        """
        try:
            await self._request("POST", "/stage_weights", self._version_body(weight_dir, version))
        except EngineError as error:
            if error.status not in (404, 405):
                raise

    async def load(self, weight_dir: str, version: PolicyVersion) -> LoadedPolicy:
        """Switch to the published weights in `weight_dir`; returns after the server samples from them."""
        body = self._version_body(weight_dir, version)
        return self._loaded(await self._request("POST", "/update_weights", body))

    async def reset(self) -> LoadedPolicy:
        """Lease the server for this run and go back to the base model, version 0.

        What a run that was killed still holds is waited for, as long as a lease lasts without a call; what a living run
        holds is not, for it calls again meanwhile.

        Raises:
            EngineError: another run holds it, and lives.
            EngineLost: the server cannot be reached.
        """
        free_in_s: float | None = None
        while True:
            try:
                return self._loaded(await self._request("POST", "/reload_weights", {"run_id": self._run_id}))
            except EngineError as error:
                if error.free_in_s is None or (free_in_s is not None and error.free_in_s >= free_in_s):
                    raise
                if free_in_s is None:
                    logger.info("waiting for the lease: {}", error)
                free_in_s = error.free_in_s
                await asyncio.sleep(min(_LEASE_PROBE_S, free_in_s))

    async def release(self) -> None:
        """Give the lease back."""
        await self._request("POST", "/release_policy", {"run_id": self._run_id}, probe=True)

    async def metrics(self) -> str:
        """Read the server's Prometheus page."""
        return (await self._request("GET", "/metrics", probe=True)).decode(errors="replace")

    def _version_body(self, weight_dir: str, version: PolicyVersion) -> dict[str, Any]:
        return {"weight_dir": weight_dir, "branch": version.branch, "step": version.step, "run_id": self._run_id}

    def _loaded(self, raw: bytes) -> LoadedPolicy:
        try:
            answer = _LOADED.decode(raw)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.url} answered what is not understood of its policy: {error}") from None
        return LoadedPolicy(
            version=PolicyVersion(answer.branch, answer.step),
            hash=answer.hash,
            is_ours=answer.run_id == self._run_id,
            stage_s=answer.stage_s,
            pause_s=answer.pause_s,
            load_s=answer.load_s,
            canary_difference=answer.canary_difference,
        )

    def _understood(self, raw: bytes, max_tokens: int | None) -> Generation:
        try:
            return _generation(self._decoder.decode(raw).choices[0], max_tokens, self._vocabulary)
        except (msgspec.DecodeError, ValueError, IndexError, OverflowError) as error:
            raise EngineError(f"{self.url}/inference/v1/generate answered what is not understood: {error}") from None

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, probe: bool = False
    ) -> bytes:
        if self._session is None:
            raise RuntimeError("Engine is used outside of `async with`")
        data = None if body is None else msgspec.json.encode(body)
        headers = None if body is None else {"Content-Type": "application/json"}
        limit = self._probe if probe else self._timeout
        for attempt in range(_RETRIES + 1):
            try:
                async with self._session.request(
                    method, self.url + path, data=data, headers=headers, timeout=limit
                ) as response:
                    answer = await response.read()
                    if response.status != 200:
                        message, free_in_s = _refusal(answer)
                        said = f"{self.url}{path} answered {response.status}: {message}"
                        raise EngineError(said, response.status, free_in_s)
                    return answer
            except TimeoutError:
                if probe:
                    raise EngineLost(
                        f"inference at {self.url} did not answer within {limit.total:g} s (client.probe_timeout)"
                    ) from None
                raise EngineError(
                    f"{self.url}{path} did not answer within {limit.total:g} s (client.timeout)", late=True
                ) from None
            except aiohttp.ClientError as error:
                if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                    raise EngineError(f"cannot connect to {self.url}: {describe(error)}") from None
                if attempt == _RETRIES:
                    raise EngineLost(f"inference at {self.url} cannot be reached: {error}") from None
        raise AssertionError("unreachable")


def sampling_parameters(config: SamplingConfig) -> dict[str, Any]:
    """Give the sampling configuration as vLLM's parameters, without the seed, which differs by request."""
    parameters = config.model_dump(include={"temperature", "top_p", "top_k", "min_p", "min_tokens"})
    return parameters | ({"max_tokens": config.max_tokens} if config.max_tokens else {})


def _generation(choice: _Choice, max_tokens: int | None, vocabulary: int | None) -> Generation:
    ids = np.array(choice.token_ids, np.int32)
    logprobs = np.array([entry.logprob for entry in choice.logprobs.content], np.float32)
    versions = np.full(len(ids), -1, np.int32)
    for span in choice.weight_versions:
        versions[span.start : span.end] = PolicyVersion.parse(span.version).step
    if not len(ids) or len(logprobs) != len(ids) or (versions < 0).any():
        raise ValueError(f"{len(ids)} ids, {len(logprobs)} logprobs, {(versions >= 0).sum()} versions")
    if max_tokens is not None and len(ids) > max_tokens:
        raise ValueError(f"{len(ids)} tokens, where at most {max_tokens} were asked for")
    if (ids < 0).any() or not (np.isfinite(logprobs).all() and (logprobs <= _POSITIVE).all()):
        raise ValueError("an id below 0, or a log-probability that is none")
    if vocabulary is not None and (ids >= vocabulary).any():
        raise ValueError(f"token {ids.max()}, where the model knows {vocabulary}")
    if choice.finish_reason not in ("stop", "length"):
        raise ValueError(f"the request ended by {choice.finish_reason!r}")
    return Generation(ids, logprobs, versions, choice.finish_reason == "length")


def _refusal(data: bytes) -> tuple[str, float | None]:
    """Return the server's own words of an error answer, on one line, and when another run's lease ends."""
    try:
        answer = msgspec.json.decode(data)
    except msgspec.DecodeError:
        answer = data.decode(errors="replace")
    free_in_s = None
    if isinstance(answer, dict) and "error" in answer:
        seconds = answer.get("free_in_s")
        free_in_s = float(seconds) if isinstance(seconds, int | float) else None
        answer = answer["error"]["message"] if isinstance(answer["error"], dict) else answer["error"]
    return " ".join(str(answer).split())[:500], free_in_s
