"""The model client of one classic verifiers rollout.

Rollouts are sampled with the run's parameters, because the trainer computes with them. Of the parameters of an
environment, only those that end a completion are used.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from pydantic_core import SchemaSerializer, core_schema
from verifiers.clients.client import Client
from verifiers.errors import ModelError, OverlongPromptError
from verifiers.types import Messages, Response, ResponseMessage, ResponseTokens, Tool, ToolCall, Usage

from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost
from prime_rl.rollouts.clients.openai_chat_client import PromptTooLong
from prime_rl.rollouts.clients.policy_endpoint import PolicyEndpoint
from prime_rl.rollouts.clients.raw_openai_client import raw_client
from prime_rl.rollouts.group_attempts import Attempt
from prime_rl.rollouts.recorder import Recorder
from prime_rl.rollouts.replies import Reply, Turn
from prime_rl.rollouts.verifiers.step_credits import GivenCredit

_LENGTHS = ("max_tokens", "max_completion_tokens")
_HARMLESS = {"n": 1, "extra_body": {}, "extra_headers": {}, "stream": False}
_WITHOUT_EFFECT = {"logprobs", "top_logprobs", "return_token_ids", "prompt_logprobs", "timeout", "model"}
"""Parameters that do not change the sampled tokens."""
_NO_PARAMETERS = ("model", "messages", "tools", "tool_choice")


class RolloutClient(Client):
    """The model client of one rollout.

    Attributes:
        recorder: records the calls.
        attempt: that it serves.
        state: of the rollout, as passed with the last call.
        raw_replies: answers of the raw client.
        credit: what the environment has set before it is scored.
    """

    def __init__(
        self,
        warn: Callable[[str, str], None],
        recorder: Recorder,
        attempt: Attempt,
        sampling: Mapping[str, Any],
        endpoint: PolicyEndpoint,
    ) -> None:
        """Serve one rollout with the run's `sampling` parameters; `warn` gets a topic and a warning."""
        super().__init__(None)
        self._endpoint = endpoint
        self.recorder = recorder
        self.attempt = attempt
        self.state: Any = None
        self.raw_replies: list[Reply] = []
        self.credit = GivenCredit()
        self._raw: Any = None
        self._has_ended = False
        self._warn = warn
        self._sampling = dict(sampling)
        self._prefix = f"{secrets.token_hex(8)}-"

    @property
    def client(self) -> Any:
        """An `openai.AsyncOpenAI` that samples from the policy; its replies in the completion are trained on."""
        if self._raw is None:
            self._raw = raw_client(self._answer_raw, self._endpoint.base_url, self._endpoint.add(self._answer_raw))
        return self._raw

    @property
    def base_url(self) -> str:
        """Address of the same API for a client of the environment's own; it needs `api_key`."""
        return str(self.client.base_url)

    @property
    def api_key(self) -> str:
        """Key for `base_url` until the group ends, or this attempt fails."""
        return str(self.client.api_key)

    def end_calls(self) -> None:
        """Refuse further calls, such as those of tasks that the environment has left, and end those of `api_key`."""
        self._has_ended = True
        if self._raw is not None:
            self._endpoint.remove(self._raw.api_key)

    def release(self) -> None:
        """End all calls, and drop the state."""
        self.end_calls()
        self.state = None  # the state refers to its client: without the cycle both are freed at once

    @property
    def is_raw(self) -> bool:
        """Whether the environment has asked for the raw client."""
        return self._raw is not None

    def _check_running(self) -> None:
        if self._has_ended:
            raise ValueError("the rollout of this client has ended")

    async def _answer_raw(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self._check_running()
        tools = body.get("tools") if body.get("tool_choice") != "none" else None
        parameters = {key: value for key, value in body.items() if key not in _NO_PARAMETERS}
        try:
            reply = await self.recorder.ask(body["messages"], tools, self._sampling_with(parameters))
        except (PromptTooLong, InferenceError, InferenceServerLost) as error:
            raise ValueError(str(error)) from error  # the recorder keeps what explains the end of the rollout
        self.raw_replies.append(reply)
        return reply.chat_completion(f"{self._prefix}{self.recorder.replies.index(reply)}", str(body.get("model", "")))

    def raise_failure(self) -> None:
        """Raise the error that explains all others, if there is one."""
        if (error := self.recorder.server_error) is not None:
            raise error

    def reply(self, response: Any) -> Reply | None:
        """Return the reply behind `response` or a copy of it; None if it is from another client."""
        name = response.get("id") if isinstance(response, Mapping) else getattr(response, "id", None)
        if not isinstance(name, str) or not name.startswith(self._prefix):
            return None
        return self.recorder.replies[int(name.removeprefix(self._prefix))]

    async def get_response(
        self,
        prompt: Messages,
        model: str,
        sampling_args: dict[str, Any],
        tools: list[Tool] | None = None,
        state: Any = None,
        **_: Any,
    ) -> Response:
        """Sample one turn; verifiers calls the model only through this method."""
        self._check_running()
        self.state = state if state is not None else self.state
        sampling = self._sampling_with(sampling_args or {})
        try:
            reply = await self.recorder.ask(prompt, await self.to_native_tools(tools), sampling)
        except (PromptTooLong, InferenceError, InferenceServerLost) as error:
            kind = OverlongPromptError if isinstance(error, PromptTooLong) else ModelError
            raise kind(str(error)) from error
        return _response(f"{self._prefix}{self.recorder.replies.index(reply)}", model, reply)

    def _sampling_with(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the run's sampling parameters with the environment's `max_tokens` and `stop`."""
        if not isinstance(asked, Mapping):
            raise ValueError(f"sampling_args is {asked!r:.80}, not a dictionary of sampling parameters")
        sampling = dict(self._sampling)
        limits = [_length(name, asked[name]) for name in _LENGTHS if asked.get(name) is not None]
        if limits:
            sampling["max_tokens"] = min([*limits, sampling.get("max_tokens") or limits[0]])
        if stop := asked.get("stop"):
            sampling["stop"] = _stops(stop)
        ignored = {
            name: value
            for name, value in asked.items()
            if name not in _LENGTHS and name not in _WITHOUT_EFFECT and name != "stop"
            if value is not None and value != _HARMLESS.get(name) and value != self._sampling.get(name)
        }
        if ignored:
            given = ", ".join(f"{name} = {value!r:.40}" for name, value in sorted(ignored.items()))
            self._warn(
                f"sampling {sorted(ignored)}",
                f"its sampling parameters are ignored ({given}), because the run's apply to sampling and training; set "
                "them in `sampling` of the environment's configuration",
            )
        return sampling

    async def to_native_tool(self, tool: Tool) -> dict[str, Any]:
        """Return the definition of a tool in the form of chat templates."""
        return tool_definition(tool)

    async def close(self) -> None:
        """Do nothing: other rollouts use the same connection."""

    # The other abstract methods serve the default get_response(), which is overridden.
    setup_client = to_native_prompt = get_native_response = None
    raise_from_native_response = from_native_response = None


def tool_definition(tool: Tool) -> dict[str, Any]:
    """Return the definition of a tool in the form of chat templates."""
    return {"type": "function", "function": tool.model_dump(exclude_none=True)}


def _length(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        raise ValueError(f"sampling_args: {name} is {value!r:.80}, not a whole number of at least 1")
    return int(value)


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError(f"sampling_args: stop is {value!r:.80}, not a text or a list of texts")
    return list(stops)


def _response(name: str, model: str, reply: Reply) -> Response:
    calls = [
        ToolCall(id=call_id, name=call.name, arguments=call.arguments)
        for call_id, call in zip(reply.call_ids, reply.parsed.calls, strict=True)
    ]
    message = ResponseMessage(
        content=reply.parsed.content,
        reasoning_content=reply.parsed.reasoning,
        tool_calls=calls or None,
        finish_reason=reply.finish_reason,
        is_truncated=reply.is_truncated,
        tokens=ResponseTokens.model_construct(**view_turn(reply.turn)) if reply.turn is not None else None,
    )
    used, sampled = reply.prompt_tokens, reply.completion_tokens
    usage = Usage(prompt_tokens=used, reasoning_tokens=0, completion_tokens=sampled, total_tokens=used + sampled)
    return Response(id=name, created=0, model=model, usage=usage, message=message)


class TokenView(Sequence[Any]):
    """A read-only list of a turn's numbers that shares the memory of the rollout; slices and sums are lists.

    With separate lists for each turn, memory would grow with the square of the number of turns.
    """

    __slots__ = ("_array", "turn")
    __pydantic_serializer__ = SchemaSerializer(
        core_schema.any_schema(serialization=core_schema.plain_serializer_function_ser_schema(list))
    )
    """Environments dump responses, also to JSON."""

    def __init__(self, turn: Turn, array: Callable[[], NDArray[Any]]) -> None:
        """View the array of `turn` that `array` returns at each access."""
        self.turn = turn
        self._array = array

    def __len__(self) -> int:
        return len(self._array())

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._array()[index].tolist()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._array().tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Sequence[Any]) -> list[Any]:
        return [*other, *self]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._array(), dtype)

    def __repr__(self) -> str:
        return repr(list(self))


def is_whole(tokens: Mapping[str, Any], turn: Turn) -> bool:
    """Return whether the tokens of a step are still the views of the whole turn."""
    views = (tokens["completion_ids"], tokens["completion_mask"])
    return all(type(view) is TokenView and view.turn is turn for view in views)


def view_turn(turn: Turn) -> dict[str, TokenView]:
    """Return the ids, masks and log-probabilities of a turn under verifiers' names."""
    sampled = len(turn.generation.token_ids)
    return {
        "prompt_ids": TokenView(turn, lambda: turn.sequence.ids[: turn.start]),
        "prompt_mask": TokenView(turn, lambda: np.broadcast_to(np.int32(0), turn.start)),
        "completion_ids": TokenView(turn, lambda: turn.generation.token_ids),
        "completion_mask": TokenView(turn, lambda: np.broadcast_to(np.int32(1), sampled)),
        "completion_logprobs": TokenView(turn, lambda: turn.generation.logprobs),
    }
