"""Any server that speaks OpenAI's chat completions: messages in, a message out, for rollouts that are not trained on.

The server renders the prompt and parses tool calls and reasoning. It tells no token ids, so these rollouts have no
samples. Ours tells between which policy versions an answer was sampled (headers `X-Policy-Version` and `-End`), and
switches to no other while rollouts are pinned (`ChatServer.pinned`).
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from copy import copy
from typing import Any, Self

import aiohttp
import msgspec
import numpy as np

from prime_rl.orchestrator.engine import EngineError, EngineLost
from prime_rl.orchestrator.messages import Message, normalise
from prime_rl.orchestrator.tool_calls import Parsed, ToolCall
from prime_rl.orchestrator.workers.recorder import PromptTooLong, Reply
from prime_rl.types import PolicyVersion, Sample

_RETRIES = 2
"""A reset connection says nothing of the server."""

_BUSY = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_BUSY_RETRIES = 6
_LONGEST_PAUSE_S = 60.0
"""A busy server, or one that limits rates, is asked again after 1, 2, 4 ... seconds, or when it says."""

_OVERFLOW = ("context length", "context_length", "context window", "too many tokens", "prompt is too long")
"""Words by which servers tell a full context from another bad request; there is no standard."""


class ContextFull(Exception):
    """The conversation does not fit into the model's context."""


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class ChatServer:
    """One OpenAI-compatible server. Use as an async context manager."""

    def __init__(self, url: str, model: str, api_key: str | None = None, timeout_s: float = 1200) -> None:
        """Prepare a client; nothing is sent before the first call.

        Args:
            url: base of the OpenAI routes, e.g. `http://localhost:8000/v1`.
            model: name that the server serves.
            api_key: sent as bearer token if given.
            timeout_s: longest time for one request, seconds.
        """
        self.url = url
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None
        self._decoder = msgspec.json.Decoder(_Completion)
        self._pins = True
        self._pin: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator["ChatServer"]:
        """Lend the server as it samples from one version, for whole rollouts: ours switches when the block has ended.

        It does not wait for ever: the headers of its answers tell. Servers that are not ours have no versions.
        """
        root = self.url.removesuffix("/v1")
        pin = await self._take_pin(root) if self._pins else None
        if pin is None:
            yield self
            return
        lent = copy(self)
        lent._pin = {"X-Policy-Pin": pin}
        try:
            yield lent
        finally:
            with suppress(aiohttp.ClientError, TimeoutError):  # without it the switch waits a little longer
                await self._post_json(f"{root}/unpin_policy", {"pin": pin})

    async def _take_pin(self, root: str) -> str | None:
        """Return the name of a pin; None of a server that does not answer so, which is not asked again."""
        try:
            status, data = await self._post_json(f"{root}/pin_policy", {})
            if status == 200:
                return str(msgspec.json.decode(data)["pin"])
        except aiohttp.ClientError:
            return None  # the rollout will see whether it is gone
        except (TimeoutError, msgspec.DecodeError, KeyError, TypeError):
            pass
        self._pins = False
        return None

    async def _post_json(self, url: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        if self._session is None:
            raise RuntimeError("ChatServer is used outside of `async with`")
        async with self._session.post(url, json=body) as response:
            return response.status, await response.read()

    async def complete(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, sampling: Mapping[str, Any]
    ) -> Reply:
        """Sample the next message.

        Args:
            messages: the conversation in normal form.
            tools: definitions in OpenAI's form.
            sampling: vLLM's parameters; what is at its default is not sent, as strict servers know fewer keys.

        Raises:
            ContextFull: the conversation is too long for the model.
            EngineLost: the server cannot be reached.
            EngineError: it refused, or its answer is not understood.
        """
        body: dict[str, Any] = {"model": self._model, "messages": to_wire(messages), **_wanted(sampling)}
        if tools:
            body["tools"] = tools
        raw, versions = await self._post(body)
        try:
            completion = self._decoder.decode(raw)
            return _reply(completion.choices[0], completion.usage or _Usage(), versions)
        except (msgspec.DecodeError, IndexError) as error:
            raise EngineError(f"{self.url}/chat/completions answered what is not understood: {error}") from None

    async def _post(self, body: Mapping[str, Any]) -> tuple[bytes, tuple[int, int] | None]:
        """Return the answer and the versions that sampled it."""
        lost = busy = 0
        while True:
            try:
                status, headers, data = await self._try(body)
            except TimeoutError:
                raise EngineError(f"{self.url} did not answer within {self._timeout.total:.0f} s") from None
            except aiohttp.ClientError as error:
                lost += 1
                if lost > _RETRIES:
                    raise EngineLost(f"the server at {self.url} cannot be reached: {error}") from None
                continue
            if status == 200:
                return data, _versions(headers)
            said = _said(data)
            if status in (400, 413, 422) and any(words in said.lower() for words in _OVERFLOW):
                raise ContextFull(said)
            busy += 1
            if status not in _BUSY or busy > _BUSY_RETRIES:
                raise EngineError(f"{self.url}/chat/completions answered {status}: {said}")
            await asyncio.sleep(min(_wanted_pause(headers) or 2.0 ** (busy - 1), _LONGEST_PAUSE_S))

    async def _try(self, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
        """Return the status, the headers, and the answer."""
        if self._session is None:
            raise RuntimeError("ChatServer is used outside of `async with`")
        async with self._session.post(f"{self.url}/chat/completions", json=body, headers=self._pin) as response:
            return response.status, response.headers, await response.read()


class ChatRecorder:
    """The turns of one rollout that a `ChatServer` answers; a `Recorder` without samples."""

    def __init__(self, server: ChatServer, seed: Sequence[int] | None = None) -> None:
        """Record one rollout; each turn is seeded from `seed`, if given."""
        self.turns: list[Reply] = []
        self.tools: list[dict[str, Any]] = []
        self.lost: EngineLost | EngineError | None = None
        self.overlong = False
        self._server = server
        self._seed = seed

    async def ask(
        self, messages: Sequence[Any], tools: list[dict[str, Any]] | None, sampling: Mapping[str, Any]
    ) -> Reply:
        """Sample the next message of a conversation; raises as `TurnRecorder.ask`."""
        self.tools = tools or []
        try:
            reply = await self._server.complete(normalise(messages), tools, {**sampling, **self._turn_seed()})
        except ContextFull as error:
            self.overlong = True
            raise PromptTooLong(str(error)) from error
        except (EngineError, EngineLost) as error:
            self.lost = error
            raise
        self.turns.append(reply)
        return reply

    def samples(self) -> tuple[Sample, ...]:
        """Give none: the server tells no tokens."""
        return ()

    @property
    def is_truncated(self) -> bool:
        """Whether the last completion was cut by a limit, or the next turn had no room."""
        return self.overlong or (bool(self.turns) and self.turns[-1].is_truncated)

    @property
    def completion_tokens(self) -> int:
        """How many tokens were sampled in all turns, as the server counts."""
        return sum(reply.completion_tokens for reply in self.turns)

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest policy version that may have sampled a turn, if the server tells of every turn."""
        spans = [reply.versions for reply in self.turns]
        told = [span for span in spans if span is not None]
        return (min(a for a, _ in told), max(b for _, b in told)) if told and len(told) == len(spans) else None

    def _turn_seed(self) -> dict[str, int]:
        if self._seed is None:
            return {}
        return {"seed": int(np.random.SeedSequence([*self._seed, len(self.turns)]).generate_state(1)[0])}


def to_wire(messages: Sequence[Message]) -> list[Message]:
    """Give messages in normal form the form that servers take: arguments as JSON text, no reasoning of the past."""
    wire = []
    for message in messages:
        sent = {key: value for key, value in message.items() if key != "reasoning_content"}
        if calls := message.get("tool_calls"):
            sent["tool_calls"] = [{**call, "function": _as_text(call["function"])} for call in calls]
        wire.append(sent)
    return wire


def _as_text(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}


_NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 0}


def _wanted(sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sampling.items() if value is not None and _NEUTRAL.get(key) != value}


def _wanted_pause(headers: Mapping[str, str]) -> float | None:
    """How long a busy server wants to be left alone, seconds."""
    after = headers.get("Retry-After", "")
    return float(after) if after.replace(".", "", 1).isdigit() else None


def _versions(headers: Mapping[str, str]) -> tuple[int, int] | None:
    """Steps of the versions that were loaded when the request came and when it was answered."""
    try:
        return (
            PolicyVersion.parse(headers["X-Policy-Version"]).step,
            PolicyVersion.parse(headers["X-Policy-Version-End"]).step,
        )
    except (KeyError, ValueError):
        return None  # not a server of ours


def _reply(choice: _Choice, usage: _Usage, versions: tuple[int, int] | None) -> Reply:
    message = choice.message
    calls = message.tool_calls or []
    parsed = Parsed(
        content=message.content or "",
        calls=tuple(ToolCall(call.function.name, _arguments(call.function.arguments)) for call in calls),
        reasoning=message.reasoning_content or message.reasoning,
    )
    return Reply(
        parsed=parsed,
        call_ids=tuple(call.id or f"call{number:05d}" for number, call in enumerate(calls)),
        is_truncated=choice.finish_reason == "length",
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        versions=versions,
    )


def _arguments(arguments: str | dict[str, Any] | None) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})


def _said(data: bytes) -> str:
    """Return the server's own words of an error answer, on one line."""
    try:
        answer = msgspec.json.decode(data)
    except msgspec.DecodeError:
        answer = data.decode(errors="replace")
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        answer = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(answer).split())[:500]
