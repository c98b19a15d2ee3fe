"""The normal form of chat messages: the form that chat templates read.

Messages that a template cannot distinguish are equal in normal form: None is empty content, the arguments of a tool
call are an object, and fields that no template reads are removed.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

from pydantic import BaseModel

from prime_rl.core.terminal_escape import replace_surrogates

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
    """Return the arguments as an object; text that is not JSON stays text."""
    if not isinstance(arguments, str):
        return deepcopy(arguments) or {}  # the environment may change its own object later
    with suppress(ValueError, RecursionError):
        return json.loads(arguments)
    return arguments
