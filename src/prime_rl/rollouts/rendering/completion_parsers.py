"""Parsers that make messages from completions.

They read text that a model has written. It is untrusted: parsing takes linear time and never raises. Text that is not a
complete call of a function with a JSON object of arguments stays content.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from prime_rl.rollouts.rendering.messages import Parsed, ToolCall, decode_json, skip

MAX_CALLS = 64
"""Maximum number of calls per message; further ones stay content. Limits the time, because each may read to the end."""

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
        position = skip(body, position, "; \n\t\r")
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
        end = None if found is None else skip(text, found[1])
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


def _json_call(text: str, position: int) -> tuple[ToolCall, int] | None:
    found = decode_json(text, position)
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
        position = skip(text, end + len("</parameter>"))
    if not text.startswith("</function>", position):
        return None
    call = _call(name, arguments)
    return None if call is None else (call, position + len("</function>"))


def _typed(value: str, schema: Any) -> Any:
    if not isinstance(schema, Mapping) or schema.get("type", "string") == "string":
        return value
    found = decode_json(value, 0)
    return value if found is None or skip(value, found[1]) != len(value) else found[0]


def _mistral_list(text: str) -> tuple[ToolCall, ...]:
    found = decode_json(text, 0)
    if found is None or not isinstance(found[0], list) or text[found[1] :].strip() or len(found[0]) > MAX_CALLS:
        return ()
    items = [item if isinstance(item, dict) else {} for item in found[0]]
    calls = tuple(call for item in items if (call := _call(item.get("name"), item.get("arguments"))) is not None)
    return calls if len(calls) == len(items) else ()


def _mistral_named(text: str) -> tuple[ToolCall, ...]:
    calls: list[ToolCall] = []
    for part in text.split("[TOOL_CALLS]", MAX_CALLS):
        name, _, arguments = part.partition("[ARGS]")
        found = decode_json(arguments, 0)
        call = None if found is None or arguments[found[1] :].strip() else _call(name.strip(), found[0])
        if call is None:
            return ()
        calls.append(call)
    return tuple(calls)
