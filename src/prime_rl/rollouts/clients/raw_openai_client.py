"""The OpenAI client that a classic environment gets as `state["client"].client`.

Its requests stay in this process: a transport answers them through the recorder of the rollout, so every token
is known. No port is opened.
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


def raw_client(answer: Answer) -> openai.AsyncOpenAI:
    """Return a client whose chat completions are `answer` of the request's body; other requests fail with 400.

    `answer` raises ValueError for a request that it refuses.
    """
    http = _http.AsyncClient(transport=_Transport(answer), trust_env=False)
    return openai.AsyncOpenAI(api_key="none", base_url="http://policy.invalid/v1", max_retries=0, http_client=http)


class _Transport(_http.AsyncBaseTransport):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def handle_async_request(self, request: Any) -> Any:
        try:
            if not request.url.path.endswith("/chat/completions"):
                raise ValueError("only chat completions are supported")
            body = json.loads(await request.aread())
            _check(body)
            return _http.Response(200, json=await self._answer(body))
        except ValueError as error:
            return _http.Response(400, json={"error": {"message": str(error), "type": "invalid_request_error"}})


def _check(body: Mapping[str, Any]) -> None:
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
