"""What a model call returns, and the normal form of chat messages.

Messages that a template cannot distinguish are equal in normal form: None is empty content, the arguments of a tool
call are an object, and fields that no template reads are removed.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from prime_rl.core.terminal_escape import replace_surrogates
from prime_rl.core.types import Routes


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled completion of T tokens.

    Attributes:
        token_ids: int32 [T].
        logprobs: float32 [T], of the sampled tokens, temperature applied.
        versions: int32 [T], step of the policy version that sampled each token. The engine reports it per token; it is
            never inferred from time (I5).
        is_truncated: cut by `max_tokens`.
        routes: of the prompt's tokens from `routes_start` on, and of all sampled tokens except the last; None: the
            server does not record them.
        routes_start: as requested by the sampling parameter `routed_experts_prompt_start`.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    is_truncated: bool
    routes: Routes | None = None
    routes_start: int = 0


class Sampler(Protocol):
    """Samples completions of token ids, such as an `InferenceClient`."""

    async def generate(self, prompt_ids: list[int], sampling: Mapping[str, Any]) -> Generation:
        """Sample one completion; see `InferenceClient.generate`."""
        ...


@dataclass(slots=True, eq=False)
class GrowingSequence:
    """The token ids of a sample that later turns may extend, int32."""

    ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The tokens of one model call. Its prompt is stored only in the sequence.

    Attributes:
        sequence: the ids of prompt and completion, and of later turns that extend it.
        start: length of the prompt.
        generation: the completion.
        parent: the turn that it extends: the prompt starts with the parent's prompt and completion.
    """

    sequence: GrowingSequence
    start: int
    generation: Generation
    parent: "Turn | None"

    @property
    def end(self) -> int:
        """Number of tokens of prompt and completion together."""
        return self.start + len(self.generation.token_ids)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: the function's name, its arguments as the text of a JSON object, and the id that the model wrote."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed message.

    Attributes:
        content: the text without reasoning and calls; stripped of outer white space if there are calls.
        calls: in order.
        reasoning: the text between the reasoning tags; None without tags.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """One answered model call.

    Attributes:
        parsed: the sampled message.
        call_ids: an id for each tool call, unique in its conversation.
        is_truncated: cut by a token limit.
        prompt_tokens: number of tokens in the prompt.
        completion_tokens: number of sampled tokens.
        tools: definitions of the offered tools, in OpenAI's form.
        turn: the tokens, if the server returns them.
        versions: oldest and newest policy version that may have sampled it, if the server returns no tokens.
        stop: the stop string that ended it.
    """

    parsed: Parsed
    call_ids: tuple[str, ...]
    is_truncated: bool
    prompt_tokens: int
    completion_tokens: int
    tools: list[dict[str, Any]] = field(default_factory=list)
    turn: Turn | None = None
    versions: tuple[int, int] | None = None
    stop: str | None = None

    @property
    def finish_reason(self) -> str:
        """Why the completion ended, in OpenAI's terms."""
        if self.is_truncated:
            return "length"
        return "tool_calls" if self.parsed.calls else "stop"

    def message(self) -> dict[str, Any]:
        """Return the message in OpenAI's form."""
        message: dict[str, Any] = {"role": "assistant", "content": self.parsed.content}
        if self.parsed.reasoning is not None:
            message["reasoning_content"] = self.parsed.reasoning
        if self.parsed.calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call_id, call in zip(self.call_ids, self.parsed.calls, strict=True)
            ]
        return message

    def chat_completion(self, name: str, model: str) -> dict[str, Any]:
        """Return the reply as OpenAI's chat completion with the id `name`, and vLLM's `stop_reason`."""
        used, sampled = self.prompt_tokens, self.completion_tokens
        choice = {"index": 0, "message": self.message(), "finish_reason": self.finish_reason, "stop_reason": self.stop}
        return {
            "id": name,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [choice],
            "usage": {"prompt_tokens": used, "completion_tokens": sampled, "total_tokens": used + sampled},
        }


Message = dict[str, Any]

_KEPT_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
_ROLES = {
    "text": "user",  # of verifiers' class for a plain-text prompt
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "chatbot", "chatgpt", "ai", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(
        ("function", "observation", "ipython", "tool_response", "function_response", "tool_result"), "tool"
    ),
}
"""Roles of other formats."""
_TEXT_PARTS = ("text", "input_text", "output_text")


def normalise(messages: Iterable[Any]) -> list[Message]:
    """Return messages (dictionaries, or objects of verifiers' classes) in normal form.

    Raises:
        ValueError: a message contains something other than text, such as an image.
    """
    return [_normalise(_fields(message)) for message in messages]


def _fields(message: Any) -> Mapping[str, Any]:
    if isinstance(message, dict | Mapping):
        return message
    if isinstance(message, BaseModel) and not message.__pydantic_extra__:
        return message.__dict__  # an attribute that it lacks would raise and catch an exception
    return {field: getattr(message, field, None) for field in _KEPT_FIELDS}


def readable(message: Message) -> str:
    """Return the text of a message in normal form: reasoning, content and tool calls. Model output: untrusted."""
    parts = [f"<think>{message['reasoning_content']}</think>"] if message.get("reasoning_content") else []
    parts += [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        parts.append(f"{function['name']}({json.dumps(function['arguments'], ensure_ascii=False)})")
    return "\n".join(parts)


def last_reply(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message of the model; "" if there is none."""
    return next((str(message["content"]) for message in reversed(messages) if message["role"] == "assistant"), "")


def role_of(name: str) -> str:
    """Return a role by its standard name, such as `assistant` for `gpt`; unknown names are kept."""
    known = name.strip().lower().replace("-", "_")
    return _ROLES.get(known, known if known in ("system", "developer", "user", "assistant", "tool") else name)


def _normalise(message: Mapping[str, Any]) -> Message:
    if not isinstance(role := message.get("role"), str):
        raise ValueError(f"a message has the role {role!r:.80}, not a text")
    normal: Message = {"role": role_of(role), "content": text_of(message.get("content"))}
    for name in ("reasoning_content", "tool_call_id", "name"):
        if message.get(name):
            normal[name] = replace_surrogates(message[name])
    if message.get("tool_calls"):
        normal["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return normal


def text_of(content: Any) -> str:
    """Join the text parts of a content. Raises ValueError for other parts, such as images."""
    if content is None or isinstance(content, str):
        return replace_surrogates(content or "")
    parts = [{"type": "text", "text": part} if isinstance(part, str) else _dictionary(part) for part in content]
    kinds = [part.get("type", "text" if "text" in part else "unknown") for part in parts]
    if other := [kind for kind in kinds if kind not in _TEXT_PARTS]:
        raise ValueError(f"a message has content of the type {other[0]!r}; only text is supported")
    texts = [part.get("text") or "" for part in parts]
    if other := [text for text in texts if not isinstance(text, str)]:
        raise ValueError(f"a part of a message has a text of the type {type(other[0]).__name__!r}")
    return "\n".join(map(replace_surrogates, texts))


def _dictionary(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping | BaseModel):
        raise ValueError(f"a message contains {value!r} in place of a part")
    return value.model_dump() if isinstance(value, BaseModel) else value


def _tool_call(call: Any) -> dict[str, Any]:
    # OpenAI nests name and arguments under `function`, verifiers does not. Both write arguments as JSON text.
    fields = _dictionary(call)
    function = fields.get("function") or fields
    return {
        "id": replace_surrogates(fields.get("id") or ""),
        "type": "function",
        "function": {
            "name": replace_surrogates(function["name"]),
            "arguments": replace_surrogates(_arguments(function.get("arguments"))),
        },
    }


def _arguments(arguments: Any) -> Any:
    """Return the arguments as an object; text that is not JSON, or nested too deeply, stays text."""
    if not isinstance(arguments, str):
        return deepcopy(arguments) or {}  # the environment may change its own object later
    found = decode_json(arguments, 0)
    return arguments if found is None or skip(arguments, found[1]) != len(arguments) else found[0]


def with_text_arguments(message: Message) -> Message:
    """Return the form of tool calls that DeepSeek's templates read: arguments as JSON text, and no empty content."""
    if not message.get("tool_calls"):
        return message
    calls = [{**call, "function": dict(call["function"])} for call in message["tool_calls"]]
    for function in (call["function"] for call in calls):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**message, "content": message["content"] or None, "tool_calls": calls}


MAX_DEPTH = 32
"""Maximum nesting of a call's arguments; encoding them recurses to this depth."""


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def decode_json(text: str, position: int) -> tuple[Any, int] | None:
    """Return the JSON value at `position` and its end; None if it is invalid or nested too deeply."""
    with suppress(ValueError, RecursionError):  # not JSON, a number of thousands of digits, or nested beyond the stack
        value, end = _DECODER.raw_decode(text, skip(text, position))
        return (value, end) if _depth_within(value, MAX_DEPTH) else None
    return None


def _depth_within(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return not any(isinstance(outer, dict | list) for outer in level)


def skip(text: str, position: int, characters: str = " \n\t\r") -> int:
    """Return the position of the next character that is not one of `characters`."""
    while position < len(text) and text[position] in characters:
        position += 1
    return position
