"""What a model call returns, and chat messages: their normal form, and the parsers that make them from completions.

Messages that a template cannot distinguish are equal in normal form: None is empty content, the arguments of a tool
call are an object, and fields that no template reads are removed.

The parsers of tool calls and reasoning read text that a model has written. It is untrusted: parsing takes linear time
and never raises. Text that is not a complete call of a function with a JSON object of arguments stays content.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from prime_rl.core.terminal_escape import replace_surrogates


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled completion of T tokens.

    Attributes:
        token_ids: int32 [T].
        logprobs: float32 [T], of the sampled tokens, temperature applied.
        versions: int32 [T], step of the policy version that sampled each token. The engine reports it per token; it is
            never inferred from time (I5).
        is_truncated: cut by `max_tokens`.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    is_truncated: bool


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
    """One call: the function's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


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
        call_ids: an id for each tool call, unique in the rollout.
        is_truncated: cut by a token limit.
        prompt_tokens: number of tokens in the prompt.
        completion_tokens: number of sampled tokens.
        tools: definitions of the offered tools, in OpenAI's form.
        turn: the tokens, if the server returns them.
        versions: oldest and newest policy version that may have sampled it, if the server returns no tokens.
    """

    parsed: Parsed
    call_ids: tuple[str, ...]
    is_truncated: bool
    prompt_tokens: int
    completion_tokens: int
    tools: list[dict[str, Any]] = field(default_factory=list)
    turn: Turn | None = None
    versions: tuple[int, int] | None = None

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
        """Return the reply as OpenAI's chat completion with the id `name`."""
        used, sampled = self.prompt_tokens, self.completion_tokens
        return {
            "id": name,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": 0, "message": self.message(), "finish_reason": self.finish_reason}],
            "usage": {"prompt_tokens": used, "completion_tokens": sampled, "total_tokens": used + sampled},
        }


Message = dict[str, Any]

_KEPT_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


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


def _normalise(message: Mapping[str, Any]) -> Message:
    role = message["role"]  # verifiers' class for a plain-text prompt has the role "text"
    normal: Message = {"role": "user" if role == "text" else role, "content": _text(message.get("content"))}
    for name in ("reasoning_content", "tool_call_id", "name"):
        if message.get(name):
            normal[name] = replace_surrogates(message[name])
    if message.get("tool_calls"):
        normal["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return normal


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return replace_surrogates(content or "")
    parts = [part if isinstance(part, Mapping) else part.model_dump() for part in content]
    if other := [part.get("type") for part in parts if part.get("type") != "text"]:
        raise ValueError(f"a message has content of the type {other[0]!r}; only text can be trained on")
    return "\n".join(replace_surrogates(str(part["text"])) for part in parts)


def _tool_call(call: Any) -> dict[str, Any]:
    # OpenAI nests name and arguments under `function`, verifiers does not. Both write arguments as JSON text.
    fields = call if isinstance(call, Mapping) else call.model_dump()
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
    found = _decode(arguments, 0)
    return arguments if found is None or _skip(arguments, found[1]) != len(arguments) else found[0]


MAX_CALLS = 64
"""Maximum number of calls per message; further ones stay content. Limits the time, because each may read to the end."""

MAX_DEPTH = 32
"""Maximum nesting of a call's arguments; encoding them recurses to this depth."""

MAX_NAME = 256
"""Maximum length of a function name, characters."""

Tool = Mapping[str, Any]


Parser = Callable[[str, Sequence[Tool]], Parsed]
"""(text, tool definitions in OpenAI's form) -> the message. Never raises."""


def hermes(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the format of Hermes, Qwen 2.5 and Qwen 3."""
    return _between_tags(text, lambda start: _json_call(text, start))


def qwen3_coder(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

    A value is text, or JSON if the tool's schema declares another type than string.
    """
    return _between_tags(text, lambda start: _xml_call(text, start, tools))


def llama3_json(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse a message of `{"name": ..., "parameters": {...}}` objects separated by `;`, without other text."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    calls: list[ToolCall] = []
    position = 0
    while body.startswith("{", position) and len(calls) < MAX_CALLS:
        found = _json_call(body, position)
        if found is None:
            break
        call, position = found
        calls.append(call)
        position = _skip(body, position, "; \n\t\r")
    return Parsed("", tuple(calls)) if calls and position == len(body) else Parsed(text)


def mistral(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` and the newer `[TOOL_CALLS]name[ARGS]{...}`."""
    content, marker, rest = text.partition("[TOOL_CALLS]")
    if not marker:
        return Parsed(text)
    calls = _mistral_list(rest) if rest.lstrip().startswith("[") else _mistral_named(rest)
    return Parsed(content.strip(), calls) if calls else Parsed(text)


PARSERS: dict[str, Parser] = {parser.__name__: parser for parser in (hermes, qwen3_coder, llama3_json, mistral)}
"""By the value of `tool_call_parser`."""


def split_reasoning(text: str, opened: bool = False) -> tuple[str | None, str]:
    """Separate `<think>...</think>` from the answer after it. With `opened`, the prompt ends with the opening tag.

    Returns:
        The reasoning without tags (None without tags), and the rest. Without a closing tag all text is reasoning.
    """
    lead = text.lstrip()
    if lead.startswith("<think>"):
        lead = lead.removeprefix("<think>")
    elif not opened:
        return None, text
    reasoning, closing, rest = lead.partition("</think>")
    return reasoning.strip("\n"), rest.lstrip("\n") if closing else ""


def _between_tags(text: str, parse_at: Callable[[int], tuple[ToolCall, int] | None]) -> Parsed:
    opening, closing = "<tool_call>", "</tool_call>"
    calls: list[ToolCall] = []
    kept: list[str] = []
    position = 0
    start = text.find(opening)
    for _ in range(MAX_CALLS):
        if start < 0:
            break
        found = parse_at(start + len(opening))
        end = None if found is None else _skip(text, found[1])
        if found is None or end is None or not (text.startswith(closing, end) or end == len(text)):
            start = text.find(opening, start + len(opening))
            continue
        calls.append(found[0])
        kept.append(text[position:start].rstrip())
        position = min(end + len(closing), len(text))
        start = text.find(opening, position)
    if not calls:
        return Parsed(text)
    return Parsed("".join([*kept, text[position:]]).strip(), tuple(calls))


def _skip(text: str, position: int, characters: str = " \n\t\r") -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def _decode(text: str, position: int) -> tuple[Any, int] | None:
    """Return the JSON value at `position` and its end; None if it is invalid or nested too deeply."""
    with suppress(ValueError, RecursionError):  # not JSON, a number of thousands of digits, or nested beyond the stack
        value, end = _DECODER.raw_decode(text, _skip(text, position))
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


def _json_call(text: str, position: int) -> tuple[ToolCall, int] | None:
    found = _decode(text, position)
    if found is None or not isinstance(found[0], dict):
        return None
    value, end = found
    call = _call(value.get("name"), value.get("arguments", value.get("parameters")))
    return None if call is None else (call, end)


def _call(name: Any, arguments: Any) -> ToolCall | None:
    """Return a call; None if its parts have wrong types or cannot be encoded as UTF-8 JSON."""
    if not (isinstance(name, str) and 0 < len(name) <= MAX_NAME and isinstance(arguments, dict)):
        return None
    with suppress(ValueError):  # an infinite number, or half of a surrogate pair
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + written).encode()
        return ToolCall(name, written)
    return None


_FUNCTION = re.compile(r"\s*<function=([^>\s]{1,256})>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\s]{1,256})>")


def _xml_call(text: str, position: int, tools: Sequence[Tool]) -> tuple[ToolCall, int] | None:
    head = _FUNCTION.match(text, position)
    if head is None:
        return None
    name, position = head[1], head.end()
    functions = (tool.get("function", tool) for tool in tools)
    found: Mapping[str, Any] = next((function for function in functions if function.get("name") == name), {})
    schema = (found.get("parameters") or {}).get("properties") or {}
    arguments: dict[str, Any] = {}
    while (parameter := _PARAMETER.match(text, position)) is not None:
        end = text.find("</parameter>", parameter.end())
        if end < 0:
            return None
        value = text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
        arguments[parameter[1]] = _typed(value, schema.get(parameter[1]))
        position = _skip(text, end + len("</parameter>"))
    if not text.startswith("</function>", position):
        return None
    call = _call(name, arguments)
    return None if call is None else (call, position + len("</function>"))


def _typed(value: str, schema: Any) -> Any:
    if not isinstance(schema, Mapping) or schema.get("type", "string") == "string":
        return value
    found = _decode(value, 0)
    return value if found is None or _skip(value, found[1]) != len(value) else found[0]


def _mistral_list(text: str) -> tuple[ToolCall, ...]:
    found = _decode(text, 0)
    if found is None or not isinstance(found[0], list) or text[found[1] :].strip() or len(found[0]) > MAX_CALLS:
        return ()
    items = [item if isinstance(item, dict) else {} for item in found[0]]
    calls = tuple(call for item in items if (call := _call(item.get("name"), item.get("arguments"))) is not None)
    return calls if len(calls) == len(items) else ()


def _mistral_named(text: str) -> tuple[ToolCall, ...]:
    calls: list[ToolCall] = []
    for part in text.split("[TOOL_CALLS]", MAX_CALLS):
        name, _, arguments = part.partition("[ARGS]")
        found = _decode(arguments, 0)
        call = None if found is None or arguments[found[1] :].strip() else _call(name.strip(), found[0])
        if call is None:
            return ()
        calls.append(call)
    return tuple(calls)
