"""The OpenAI client that a classic environment gets as `state["client"].client`, and the endpoint of its address.

client = state["client"].client                                   answered in this process, no port is opened
AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)     answered by `PolicyEndpoint`, also from a subprocess

An environment in an interpreter of its own asks `PolicyEndpoint` over the connection to its worker. All answer through
the recorder of the rollout, so every token is known.
"""

import asyncio
import contextvars
import importlib
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import openai
from aiohttp import web

from prime_rl.rollouts.rendering.messages import Reply, normalise

# Releases of openai use httpx or httpx2; transport and response must be of the same library.
_http: Any = importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])

Answer = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]


def raw_client(answer: Answer, base_url: str, api_key: str) -> openai.AsyncOpenAI:
    """Return a client whose chat completions are `answer` of the request's body; other requests fail with 400.

    `answer` raises ValueError for a request that it refuses. Nothing is sent to `base_url`.
    """
    http = _http.AsyncClient(transport=_Transport(answer), trust_env=False)
    return openai.AsyncOpenAI(api_key=api_key, base_url=base_url, max_retries=0, http_client=http)


async def respond(answer: Answer, path: str, content: Any) -> tuple[int, dict[str, Any]]:
    """Return status and body of the response to a request, whose content may be JSON text as bytes."""
    try:
        if not path.endswith("/chat/completions"):
            raise ValueError("only chat completions are supported")
        body = json.loads(content) if isinstance(content, bytes) else content
        _check(body)
        return 200, await answer(body)
    except ValueError as error:
        return 400, error_body(str(error))


def error_body(message: str) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    return {"error": {"message": message, "type": "invalid_request_error"}}


class _Transport(_http.AsyncBaseTransport):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def handle_async_request(self, request: Any) -> Any:
        status, body = await respond(self._answer, request.url.path, await request.aread())
        return _http.Response(status, json=body)


def _check(body: Any) -> None:
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise ValueError("the body has no list of messages")
    if not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in body["messages"]):
        raise ValueError("each message needs a role")


Context = tuple[int, int]
"""Hashes of the messages of a request: of all of them, and of the last one."""


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A call of the policy in one rollout.

    Attributes:
        reply: its answer.
        is_raw: it came through the raw client.
        context: of its request; None if the raw client was not in use yet.
    """

    reply: Reply
    is_raw: bool
    context: Context | None


def context_of(messages: Sequence[Any]) -> Context:
    """Return the context of the request with these messages."""
    return _contexts(normalise(messages))[-1]


def replies_in(prompt: Sequence[Any], completion: Sequence[Any], calls: Sequence[AnsweredCall]) -> list[Reply]:
    """Return the replies of the raw client that are messages of a completion.

    Messages have no ids, so equal texts are distinguished by the conversation that the model was asked to continue: a
    user that the policy simulates, and a judge, are asked something else.

    Raises:
        ValueError: a message can be several replies, so it is unknown which tokens to train on.
    """
    conversation = normalise([*prompt, *completion])
    contexts, keys = _contexts(conversation), list(map(_key, conversation))
    places = [i for i in range(len(prompt), len(keys)) if conversation[i]["role"] == "assistant"]
    said = {keys[place] for place in places}
    free = [(key, call) for call in calls if (key := _key(normalise([call.reply.message()])[0])) in said]
    found: dict[int, AnsweredCall] = {}
    for matches in (lambda call, context: call.context == context, _answers, lambda call, context: True):
        for place in places:
            equal = [call for key, call in free if key == keys[place] and matches(call, contexts[place])]
            if place in found or not equal:
                continue
            rivals = [other for other in places if other not in found and keys[other] == keys[place]]
            same_text = sum(any(matches(call, contexts[other]) for call in equal) for other in rivals)
            if len(equal) > same_text and len({call.context for call in equal}) > 1:
                raise ValueError(
                    f"{len(equal)} calls were answered with the same message, and state['completion'] contains it "
                    f"{same_text} times; append the responses to train on to state['trajectory']"
                )
            found[place] = equal[0]
            free = [(key, call) for key, call in free if call is not equal[0]]
    return [found[place].reply for place in places if place in found and found[place].is_raw]


def _answers(call: AnsweredCall, context: Context) -> bool:
    return call.context is not None and call.context[1] == context[1]


def _contexts(messages: Sequence[Mapping[str, Any]]) -> list[Context]:
    """Return the context of each message, and of one after the last."""
    contexts = [(0, 0)]
    for message in messages:
        last = hash((message["role"], _key(message)))
        contexts.append((hash((contexts[-1][0], last)), last))
    return contexts


def _key(message: Mapping[str, Any]) -> str:
    """Return the text and tool calls of a message; environments keep the content, often stripped, not the reasoning."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps([message["content"].strip(), calls], sort_keys=True)


_MAX_BODY_BYTES = 64 * 2**20


class PolicyEndpoint:
    """Answers chat completions, those of `ask` and those that are sent to 127.0.0.1.

    Each rollout has a secret key, which is valid until the rollout ends.
    """

    def __init__(self) -> None:
        """Open no port before the first rollout asks for `base_url`."""
        self._answers: dict[str, Answer] = {}
        self._requests: dict[str, set[asyncio.Task[Any]]] = {}
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        """Address for clients. Needs the running event loop."""
        if self._socket is None:
            # It accepts connections from now on; they wait until the server runs.
            self._socket = socket.create_server(("127.0.0.1", 0))
            # A new context: the server is for all groups, not only for the one that starts it.
            self._task = asyncio.get_running_loop().create_task(
                self._serve(self._socket), context=contextvars.Context()
            )
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"

    def add(self, answer: Answer) -> str:
        """Return a new key, whose requests get `answer`."""
        key = secrets.token_urlsafe(24)
        self._answers[key] = answer
        return key

    def remove(self, key: str) -> None:
        """End the requests with the key, so that the server stops sampling, and refuse further ones."""
        self._answers.pop(key, None)
        for task in self._requests.pop(key, ()):
            task.cancel()

    async def _serve(self, listening: socket.socket) -> None:
        application = web.Application(client_max_size=_MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._handle)
        # A client that disconnects cancels its request, so that the server stops sampling.
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
        await runner.setup()
        try:
            await web.SockSite(runner, listening).start()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    async def ask(self, key: str, path: str, content: Any) -> tuple[int, dict[str, Any]]:
        """Return status and body of the response to a request with this key; see `respond`.

        `remove` cancels the task that awaits it.
        """
        if (answer := self._answers.get(key)) is None:
            refusal = "the key is not that of a running rollout; use the api_key of state['client'].client"
            return 401, error_body(refusal)
        task = asyncio.current_task()
        assert task is not None
        requests = self._requests.setdefault(key, set())
        requests.add(task)
        try:
            return await respond(answer, path, content)
        finally:
            requests.discard(task)

    async def _handle(self, request: web.Request) -> web.Response:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        status, body = await self.ask(key, request.path, await request.read())
        return web.json_response(body, status=status)
