"""Client of any server with OpenAI's chat completions, for rollouts that are not trained on.

The server renders the prompt and parses tool calls and reasoning. It returns no token ids, so these rollouts have no
samples.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from copy import copy
from typing import Any

import aiohttp
import msgspec

from prime_rl.core.http_requests import connection_error
from prime_rl.core.retries import Retries, growing_pauses
from prime_rl.core.terminal_escape import replace_surrogates
from prime_rl.core.types import PolicyVersion
from prime_rl.rollouts.clients.inference_client import (
    HttpClient,
    InferenceError,
    InferenceServerLost,
    decode_error,
    valid_response,
)
from prime_rl.rollouts.rendering.messages import Message, Parsed, Reply, ToolCall

_CONNECTION_RETRIES = 2

_BUSY = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_BUSY_RETRIES = 6
_MAX_PAUSE_SECONDS = 60.0
"""A busy or rate-limiting server is retried after 1, 2, 4 ... seconds, or after its Retry-After."""

_OVERFLOW = ("context length", "context_length", "context window", "too many tokens", "prompt is too long")
"""Phrases in a server's message for a prompt that exceeds the context; there is no standard."""


_DEFAULTS = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 0}


class PromptTooLong(Exception):
    """A prompt leaves no space for a completion in `seq_len`, or does not fit into the model's context."""


class _ChatFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ChatToolCall(msgspec.Struct):
    function: _ChatFunction
    id: str | None = None


class _ChatMessage(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ChatToolCall] | None = None


class _ChatChoice(msgspec.Struct):
    message: _ChatMessage
    finish_reason: str | None = None
    stop_reason: Any = None  # of vLLM: the stop string, or the id of a token


class _ChatUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _ChatResponse(msgspec.Struct):
    choices: list[_ChatChoice]
    usage: _ChatUsage | None = None


_decode_response = msgspec.json.Decoder(_ChatResponse).decode


class ChatServer(HttpClient):
    """One server with OpenAI's chat completions, at a base URL such as `http://localhost:8000/v1`."""

    _supports_pins = True
    _pin_header: Mapping[str, str] = {}

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator["ChatServer"]:
        """Return this server pinned to its policy version: one of our servers delays a switch until the block ends.

        The delay is limited; the response headers contain the versions that sampled. Other servers have no versions.
        """
        root = self.url.removesuffix("/v1")
        pin = await self._take_pin(root) if self._supports_pins else None
        if pin is None:
            yield self
            return
        pinned = copy(self)
        pinned._pin_header = {"X-Policy-Pin": pin}
        try:
            yield pinned
        finally:
            with suppress(aiohttp.ClientError, TimeoutError):  # without it the switch is delayed a little longer
                await self._post(f"{root}/unpin_policy", json.dumps({"pin": pin}).encode())

    async def _take_pin(self, root: str) -> str | None:
        """Return the name of a new pin; None if the server does not support pins."""
        try:
            status, _, data = await self._post(f"{root}/pin_policy", json.dumps({"name": self._model}).encode())
            if status == 200:
                return str(msgspec.json.decode(data)["pin"])
            self._supports_pins = status not in (404, 405)  # other refusals, as of a missing slot, may end
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
            self._supports_pins = isinstance(error, aiohttp.ClientError)  # the rollout detects a lost server
        return None

    async def complete(
        self, messages: Sequence[Message], tools: list[dict[str, Any]], sampling: Mapping[str, Any]
    ) -> Reply:
        """Sample the next message of a conversation in normal form.

        Defaults among the vLLM sampling parameters are not sent, because strict servers reject unknown keys.

        Raises:
            PromptTooLong: the conversation does not fit into the model's context.
            InferenceServerLost: the server cannot be reached.
            InferenceError: it refused, or its response is invalid.
        """
        sent = {key: value for key, value in sampling.items() if value is not None and _DEFAULTS.get(key) != value}
        body = {"model": self._model, "messages": to_wire(messages), **sent}
        raw, versions = await self._ask(body | ({"tools": tools} if tools else {}))
        with valid_response(f"{self.url}/chat/completions"):
            if rb"\ud" in raw.lower():  # perhaps half of a surrogate pair: Python's json accepts it, msgspec does not
                response = msgspec.convert(replace_surrogates(json.loads(raw)), _ChatResponse)
            else:
                response = _decode_response(raw)
            return _reply(response.choices[0], response.usage or _ChatUsage(), tools, versions)

    async def _ask(self, body: Mapping[str, Any]) -> tuple[bytes, tuple[int, int] | None]:
        """Return the response and the versions that sampled it."""
        url, data = f"{self.url}/chat/completions", json.dumps(body).encode()
        pauses = (min(pause, _MAX_PAUSE_SECONDS) for pause in growing_pauses(1.0, _BUSY_RETRIES, factor=2.0))
        lost, retries = 0, Retries(pauses)
        while True:
            try:
                status, headers, answer = await self._post(url, data, self._pin_header)
            except TimeoutError:
                raise InferenceError(f"{self.url} did not respond within {self._timeout_seconds:.0f} s") from None
            except aiohttp.ClientError as error:
                lost += 1
                if lost > _CONNECTION_RETRIES:
                    reason = connection_error(error)
                    text = f"the server at {self.url} cannot be reached: {reason.strerror or reason}"
                    raise InferenceServerLost(text) from None
                continue
            if status == 200:
                return answer, _versions(headers)
            message, _ = decode_error(answer)
            if status in (400, 413, 422) and any(phrase in message.lower() for phrase in _OVERFLOW):
                raise PromptTooLong(message)
            after = headers.get("Retry-After", "")
            asked = float(after) if after.replace(".", "", 1).isdigit() else 0.0
            if status not in _BUSY or not await retries.pause(min(asked, _MAX_PAUSE_SECONDS) or None):
                raise InferenceError(f"{url} returned {status}: {message}")


def to_wire(messages: Sequence[Message]) -> list[Message]:
    """Convert messages in normal form to the form that servers accept: arguments as JSON text, no past reasoning."""
    wire = []
    for message in messages:
        sent = {key: value for key, value in message.items() if key != "reasoning_content"}
        if calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            texts = [{**function, "arguments": _text(function["arguments"])} for function in functions]
            sent["tool_calls"] = [{**call, "function": text} for call, text in zip(calls, texts, strict=True)]
        wire.append(sent)
    return wire


def _versions(headers: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the versions that were loaded at the start and at the end of the request; None for a foreign server."""
    with suppress(KeyError, ValueError):
        first, last = headers["X-Policy-Version"], headers["X-Policy-Version-End"]
        return PolicyVersion.parse(first).step, PolicyVersion.parse(last).step
    return None


def _reply(
    choice: _ChatChoice, usage: _ChatUsage, tools: list[dict[str, Any]], versions: tuple[int, int] | None
) -> Reply:
    message, calls = choice.message, choice.message.tool_calls or []
    return Reply(
        Parsed(
            message.content or "",
            tuple(ToolCall(call.function.name, _text(call.function.arguments)) for call in calls),
            message.reasoning_content or message.reasoning,
        ),
        tuple(call.id or f"call{number:05d}" for number, call in enumerate(calls)),
        choice.finish_reason == "length",
        usage.prompt_tokens,
        usage.completion_tokens,
        tools,
        versions=versions,
        stop=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
    )


def _text(arguments: str | dict[str, Any] | None) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})
