"""The model calls of agents that verifiers intercepts, in each API that it serves.

Verifiers sends the id of the trace as the session id, which selects the agent whose recorder in the worker samples the
reply.
"""

import asyncio
import json
import math
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from aiohttp import web
from pydantic._internal import _fields
from verifiers.v1.clients import Client
from verifiers.v1.clients.client import RelayReply
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.types import AssistantMessage, Response, SamplingConfig, ToolCall, Usage

from .agent_apis import AGENT_APIS, AgentApi, error_body, without_nulls
from .values import CONTEXT_OVERFLOW

_HEADERS_SECONDS = 2.0
"""Time in which a failed request for a stream is answered with its status; later ones fail within the stream."""

_BACKLOG = 4096
"""Connections that wait until the event loop accepts them; the kernel may limit them (net.core.somaxconn)."""

_TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("messages", "tools"), (list, "a list")),
    **dict.fromkeys(("input", "system"), (str | list, "a text or a list")),
    **dict.fromkeys(("output_config", "reasoning", "text"), (dict, "an object")),
    "stream": (bool, "true or false"),
    **dict.fromkeys(
        (
            *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
            *("max_tokens", "max_completion_tokens", "max_output_tokens"),
        ),
        (int | float, "a finite number"),
    ),
}
"""Types of keys of requests, which mean the same in each API. Verifiers checks only some of them."""

_REQUIRED = {"/v1/chat/completions": ("messages",), "/v1/messages": ("messages", "max_tokens")}
"""Keys that the vendors require, by path."""

Ask = Callable[[int, Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""Answers the body of a chat completion of an agent of an episode. Raises ValueError if it does not."""

CountTokens = Callable[[list[Any], list[Any] | None], Awaitable[int]]
"""Returns the number of tokens of messages with tools, in OpenAI's form. Raises ValueError."""


@dataclass(slots=True)
class OpenTrace:
    """A trace of a running episode.

    Attributes:
        agent: its number in the episode, in the order in which they started.
        ask: samples its replies.
        answers: verifiers' messages, and the ids of the replies.
        streamed: the same of streams, after their prompts: verifiers makes their messages again, without those that an
            agent has left, so an equal message is the one after the same prompt, or else in the order of the replies.
        is_full: a prompt did not fit.
    """

    agent: int
    ask: Ask
    answers: list[tuple[AssistantMessage, str]] = field(default_factory=list)
    streamed: list[tuple[list[Any], AssistantMessage, str]] = field(default_factory=list)
    is_full: bool = False

    def replies_in(self, trace: Any) -> list[str]:
        """Return the ids of the replies in the trace, without those that verifiers rejected or a hook rewrote."""
        kept, made = {id(node.message) for node in trace.nodes}, {id(message) for message, _ in self.answers}
        found = {name for message, name in self.answers if id(message) in kept}
        left = [node for node in trace.nodes if node.sampled and id(node.message) not in made]
        for is_any_prompt in (False, True):
            for prompt, message, name in self.streamed:
                for index, node in enumerate(left if name not in found else ()):
                    if node.message == message and (is_any_prompt or _given_before(trace, node) == prompt):
                        del left[index]
                        found.add(name)
                        break
        return sorted(found, key=lambda name: int(name.rpartition("-")[2]))


def _given(messages: Iterable[Any]) -> list[Any]:
    """Return the messages that no model wrote."""
    return [message for message in messages if not isinstance(message, AssistantMessage)]


def _given_before(trace: Any, node: Any) -> list[Any]:
    path = []
    while node.parent is not None:
        node = trace.nodes[node.parent]
        path.append(node.message)
    return _given(reversed(path))


class InterceptionClient(Client):
    """Answers the model calls of all running traces, in each API that verifiers serves.

    Attributes:
        traces: by the id of the trace.
    """

    def __init__(self, count_tokens: CountTokens) -> None:
        self.traces: dict[str, OpenTrace] = {}
        self._count_tokens = count_tokens

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Sample one reply; ProviderError if it fails. The body contains the parameters of the agent's sampling."""
        trace, api = self._open(dialect, session_id)
        completion, reply = await self._sample(trace, api, body)
        if isinstance(dialect, ChatDialect):
            response = _response(completion)
        else:
            response = dialect.parse_response(dialect.validate_response(reply))
            response.raw = reply
        trace.answers.append((response.message, completion["id"]))
        return response

    async def relay(
        self, dialect: Dialect, body: dict[str, Any], session_id: str | None = None, headers: Any = None
    ) -> RelayReply:
        """Stream one reply; ProviderError if it fails early, later an event of the stream; called by verifiers."""
        trace, api = self._open(dialect, session_id)
        sampling = asyncio.ensure_future(self._sample(trace, api, body))

        async def chunks() -> AsyncIterator[bytes]:
            try:
                completion, reply = await sampling
            except ProviderError as error:
                for event in api.failure(error.status_code, str(error)):
                    yield event
                if dialect.is_terminal_event(event):
                    return
                raise  # else verifiers would take the failure for an empty reply
            events, parser = list(api.events(reply, body)), dialect.stream_parser()
            for event in events:
                parser.feed(event)
            prompt = _given(dialect.parse_request(body).messages)
            trace.streamed.append((prompt, parser.finish().message, completion["id"]))
            for event in events:
                yield event

        async def close() -> None:
            sampling.cancel()
            await asyncio.wait([sampling])

        try:
            await asyncio.wait([sampling], timeout=_HEADERS_SECONDS)
            if sampling.done():
                sampling.result()
        except BaseException:
            await close()
            raise
        return RelayReply("text/event-stream", chunks(), close)

    async def relay_aux(
        self, dialect: Dialect, route: str, body: dict[str, Any], headers: Any = None
    ) -> dict[str, Any]:
        """Return the number of tokens of a prompt in Anthropic's form; called by verifiers."""
        api = AGENT_APIS.get(dialect.upstream_path)
        if api is None or not route.endswith("/count_tokens"):
            raise ProviderError(f"{route} is not supported", status_code=400)
        chat = _chat_body(api, body)
        try:
            return {"input_tokens": await self._count_tokens(chat["messages"], chat.get("tools"))}
        except ValueError as error:
            raise ProviderError(str(error), status_code=400) from error

    def _open(self, dialect: Dialect, session_id: str | None) -> tuple[OpenTrace, AgentApi]:
        trace, api = self.traces.get(session_id or ""), AGENT_APIS.get(dialect.upstream_path)
        if trace is None or api is None:
            raise ProviderError("only calls of a running rollout are supported", status_code=400)
        return trace, api

    async def _sample(
        self, trace: OpenTrace, api: AgentApi, body: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a chat completion, and the reply in the form of the API."""
        chat = _chat_body(api, body)
        try:
            completion = await trace.ask(trace.agent, chat)
        except ValueError as error:
            trace.is_full = trace.is_full or CONTEXT_OVERFLOW in str(error)
            raise ProviderError(str(error), status_code=400) from error  # 400: no retry, the group has failed
        return completion, api.reply(completion, body)


def adapt_server(server: Any) -> None:
    """Let the server treat agents as the vendors do.

    A null key is an absent one, errors have the form of both vendors, and a client that disconnects ends its request.
    """
    handle, server.handler_cancellation = server.request_handler, True

    async def answer(request: web.Request) -> web.StreamResponse:
        if not request.path.startswith("/v1/"):
            return cast(web.StreamResponse, await handle(request))
        try:
            if request.method == "POST":
                body = json.loads(raw := await request.read())
                _check_types(body, request.path)
                if b"null" in raw:
                    request._read_bytes = json.dumps(without_nulls(body)).encode()
            response = await handle(request)
            if response.status < 400:
                return cast(web.StreamResponse, response)
            status, message = response.status, json.loads(response.body)["error"]["message"]
        except web.HTTPException as error:
            status, message = error.status, f"{request.method} {request.path} is not supported: {error.reason}"
        except Exception as error:
            if isinstance(error, ConnectionError) or request.writer.output_size:
                raise
            status, message = 400, _describe(error)
        return web.json_response(error_body(status, message), status=status)

    server.request_handler = answer


def speed_up_defaults() -> None:
    """Let pydantic (2.14) not parse the signature of `list` for each message of a trace, 0.2 ms of each turn."""
    inspect = getattr(_fields, "takes_validated_data_argument", None)
    if inspect is not None and not hasattr(inspect, "knows_list"):

        def takes_data(factory: Any) -> Any:
            return factory is not list and inspect(factory)

        takes_data.knows_list = True  # type: ignore[attr-defined]
        _fields.takes_validated_data_argument = takes_data  # type: ignore[assignment]


def lengthen_backlog(server: Any) -> None:
    """Let hundreds of agents connect to verifiers' server at once; beyond aiohttp's 128, connections are reset."""
    for site in server.runner.sites:
        for listener in site._server.sockets:
            with socket.socket(fileno=os.dup(listener.fileno())) as same:
                same.listen(_BACKLOG)


def _chat_body(api: AgentApi, body: dict[str, Any]) -> dict[str, Any]:
    try:
        return api.chat_body(body)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ProviderError(_describe(error), status_code=400) from error


def _check_types(request: Any, path: str) -> None:
    """Raise ValueError if a key has a type that the vendors refuse, or if a required one is missing."""
    if not isinstance(request, dict):
        raise ValueError("the body is not an object")
    for name in _TYPES.keys() & request.keys():
        (kind, what), value = _TYPES[name], request[name]
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if value is not None and not (fits and (not isinstance(value, float) or math.isfinite(value))):
            raise ValueError(f"{name} is {value!r:.80}, not {what}")
    for name in _REQUIRED.get(path, ()):
        if request.get(name) is None:
            raise ValueError(f"{name} is missing")


def _describe(error: Exception) -> str:
    """Return what is wrong with a request, without names of exceptions of Python."""
    if isinstance(error, json.JSONDecodeError):
        return f"the body is not JSON: {error}"
    if isinstance(error, KeyError):
        return f"malformed request: {error.args[0]!r:.80} is missing in a part of it"
    return str(error) if isinstance(error, ValueError) else "malformed request: a part of it has the wrong type"


def _response(raw: dict[str, Any]) -> Response:
    """Return OpenAI's chat completion as verifiers' response."""
    choice = raw["choices"][0]
    message = AssistantMessage(
        content=choice["message"]["content"],
        reasoning_content=choice["message"].get("reasoning_content"),
        tool_calls=[ToolCall(id=call["id"], **call["function"]) for call in choice["message"].get("tool_calls") or ()]
        or None,
    )
    response = Response(
        id=raw["id"],
        created=raw["created"],
        model=raw["model"],
        message=message,
        finish_reason=choice["finish_reason"],
        usage=Usage(prompt_tokens=raw["usage"]["prompt_tokens"], completion_tokens=raw["usage"]["completion_tokens"]),
    )
    response.raw = raw  # the format that harnesses read
    return response
