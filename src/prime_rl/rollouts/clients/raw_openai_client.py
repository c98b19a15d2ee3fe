"""The OpenAI client that a classic environment gets as `state["client"].client`.

Its requests stay in this process: a transport answers them through the recorder of the rollout, so every token
is known. Its `base_url` and `api_key` are those of the worker's `PolicyEndpoint`, for clients of the environment's own.
"""

import importlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import openai

from prime_rl.rollouts.rendering.messages import normalise
from prime_rl.rollouts.replies import Reply

_REFUSED = ("response_format", "logit_bias", "functions", "function_call", "modalities", "audio")
"""Parameters that change what is sampled, and that the trainer does not know."""

# Releases of openai use httpx or httpx2; transport and response must be of the same library.
_http: Any = importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])

Answer = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]


def raw_client(answer: Answer, base_url: str, api_key: str) -> openai.AsyncOpenAI:
    """Return a client whose chat completions are `answer` of the request's body; other requests fail with 400.

    `answer` raises ValueError for a request that it refuses. Nothing is sent to `base_url`.
    """
    http = _http.AsyncClient(transport=_Transport(answer), trust_env=False)
    return openai.AsyncOpenAI(api_key=api_key, base_url=base_url, max_retries=0, http_client=http)


async def respond(answer: Answer, path: str, content: bytes) -> tuple[int, dict[str, Any]]:
    """Return status and body of the response to a request."""
    try:
        if not path.endswith("/chat/completions"):
            raise ValueError("only chat completions are supported")
        body = json.loads(content)
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
    if body.get("stream"):
        raise ValueError("stream is not supported")
    if body.get("n") not in (None, 1):
        raise ValueError("n > 1 is not supported; call the client several times")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise ValueError("only tool_choice auto and none are supported")
    if found := [name for name in _REFUSED if body.get(name) is not None]:
        raise ValueError(f"{found[0]} is not supported")


def replies_in(completion: Sequence[Any], replies: Sequence[Reply]) -> list[Reply]:
    """Return those of the raw client's replies that are messages of a completion.

    Raises:
        ValueError: a message can be several replies, so it is unknown which tokens to train on.
    """
    said = [_key(message) for message in normalise(completion) if message["role"] == "assistant"]
    found: list[Reply] = []
    for key in dict.fromkeys(said):
        equal = [reply for reply in replies if _key(_message(reply)) == key]
        if len(equal) > said.count(key):
            raise ValueError(
                f"{len(equal)} calls were answered with the same message, and state['completion'] contains it "
                f"{said.count(key)} times; call `self.get_model_response` for those to train on"
            )
        found += equal
    return found


def _message(reply: Reply) -> dict[str, Any]:
    (message,) = normalise([reply.message()])
    return message


def _key(message: Mapping[str, Any]) -> str:
    """Return the text and tool calls of a message; environments keep the content, and rarely the reasoning."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps([message["content"], calls], sort_keys=True)
