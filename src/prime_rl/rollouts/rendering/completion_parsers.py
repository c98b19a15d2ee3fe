"""Parsers that make messages from completions.

They read text that a model has written. It is untrusted: parsing takes linear time and never raises. Text that is not a
complete call of a function with a JSON object of arguments stays content.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
    return _between(text, "<tool_call>", "</tool_call>", lambda start: _json_call(text, start), calls_per_block=1)


def qwen3_coder(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` (Qwen3-Coder, 3.5)."""
    return _parse_markup(_QWEN3_CODER, text, tools)


def glm45(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>` (GLM-4.5 to 5)."""
    return _parse_markup(_GLM, text, tools)


def minimax_m2(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse `<invoke name="..."><parameter name="...">` elements in `<minimax:tool_call>` (MiniMax M2)."""
    return _parse_markup(_MINIMAX, text, tools)


def kimi_k2(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse `functions.name:0` and JSON arguments between the special tokens of Kimi K2; the calls have these ids."""

    def parse_at(start: int) -> tuple[ToolCall, int] | None:
        head = _KIMI_HEAD.match(text, start)
        found = None if head is None else _arguments_call(text, head[2], head.end(), "<|tool_call_end|>")
        if head is None or found is None:
            return None
        return replace(found[0], id=head[1] if ":" in head[1] else ""), found[1]

    return _between(text, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", parse_at)


def deepseek_v3(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse the calls of DeepSeek V3, R1 and V3.1 (special tokens around JSON), and of V3.2 and V4 (DSML elements)."""

    def parse_at(start: int) -> tuple[ToolCall, int] | None:
        head = _DEEPSEEK_HEAD.match(text, start)
        return None if head is None else _arguments_call(text, head[1] or head[2], head.end(), "<｜tool▁call▁end｜>")

    if (markup := next((markup for markup in _DSML if markup.opening in text), None)) is not None:
        return _parse_markup(markup, text, tools)
    return _between(text, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", parse_at)


def gpt_oss(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse the messages of gpt-oss (Harmony): analysis is reasoning, final and commentary are content.

    The body of a call that is malformed, or made without `tools`, is content.
    """
    if "<|message|>" not in text:
        return Parsed(text)
    parts: dict[str, list[str]] = {"content": [], "analysis": []}
    calls: list[ToolCall] = []
    for message in text.split("<|start|>"):
        header, _, rest = message.partition("<|message|>")
        body = _HARMONY_END.split(rest, maxsplit=1)[0]
        channel, recipient = _HARMONY_CHANNEL.search(header), _HARMONY_RECIPIENT.search(header)
        found = decode_json(body, 0) if recipient and tools and len(calls) < MAX_CALLS else None
        is_whole = found is not None and skip(body, found[1]) == len(body)
        call = _call(recipient[1], found[0]) if recipient and found and is_whole else None
        if call is not None:
            calls.append(call)
        else:
            parts["analysis" if channel and channel[1] == "analysis" and not recipient else "content"].append(body)
    reasoning = "\n".join(parts["analysis"]) if parts["analysis"] else None
    return Parsed("\n".join(part for part in parts["content"] if part), tuple(calls), reasoning)


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


PARSERS: dict[str, Parser] = {
    parser.__name__: parser
    for parser in (hermes, qwen3_coder, llama3_json, mistral, glm45, kimi_k2, deepseek_v3, minimax_m2, gpt_oss)
}
"""By the value of `tool_call_parser`.."""

# Text that only templates with this format contain. A template of Hermes has the tags of others, so it is not here.
_MARKERS: dict[Parser, tuple[str, ...]] = {
    kimi_k2: ("<|tool_calls_section_begin|>",),
    deepseek_v3: ("<｜tool▁calls▁begin｜>", "｜DSML｜"),
    minimax_m2: ("<minimax:tool_call>",),
    glm45: ("<arg_key>",),
    gpt_oss: ("<|channel|>",),
    mistral: ("[TOOL_CALLS]",),
    qwen3_coder: ("<function=",),
    llama3_json: ('"parameters": ', "<|eot_id|>"),
}


def parser_of_template(template: str) -> Parser:
    """Return the parser of the calls that a chat template writes; `hermes` if it has no format that is known."""
    for parser, markers in _MARKERS.items():
        is_there = [marker in template for marker in markers]
        if all(is_there) if parser is llama3_json else any(is_there):
            return parser
    return hermes


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


def _between(
    text: str,
    opening: str,
    closing: str,
    parse_at: Callable[[int], tuple[ToolCall, int] | None],
    calls_per_block: int = MAX_CALLS,
) -> Parsed:
    """Parse blocks of calls. A block that does not consist of calls stays content; its end may be missing at last."""
    calls: list[ToolCall] = []
    kept: list[str] = []
    position = 0
    start = text.find(opening)
    for _ in range(MAX_CALLS):
        if start < 0 or len(calls) >= MAX_CALLS:
            break
        found, end = list[ToolCall](), start + len(opening)
        while len(found) < calls_per_block and (call := parse_at(end)) is not None:
            found.append(call[0])
            end = skip(text, call[1])
        if not found or not (text.startswith(closing, end) or end == len(text)):
            start = text.find(opening, start + len(opening))
            continue
        calls += found
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


def _arguments_call(text: str, name: str, position: int, closing: str) -> tuple[ToolCall, int] | None:
    """Parse the JSON object of arguments at `position` up to `closing`; DeepSeek V3 writes it in a block of code."""
    found = decode_json(text, position)
    call = None if found is None else _call(name, found[0])
    if found is None or call is None:
        return None
    end = skip(text, found[1], "` \n\t\r")
    if text.startswith(closing, end):
        return call, end + len(closing)
    return (call, end) if end == len(text) else None


_KIMI_HEAD = re.compile(
    r"\s*<\|tool_call_begin\|>\s*((?:functions\.)?([^\s<:]{1,256})(?::\d{1,9})?)\s*<\|tool_call_argument_begin\|>"
)
_DEEPSEEK_HEAD = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([^\s<]{1,256})\s*```json|([^\s<]{1,256})<｜tool▁sep｜>)"
)
_HARMONY_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_HARMONY_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]{1,256})")
_HARMONY_END = re.compile(r"<\|(?:end|call|return)\|>")


@dataclass(frozen=True, slots=True)
class _Markup:
    """A format that writes arguments as elements.

    Attributes:
        opening, closing: around a block of calls.
        head: the start of a call; group 1 is the name.
        parameter: the start of an argument; group 1 is its key, a second group `true` if the value is text.
        value_end: the end of a value.
        end: the end of a call; empty if the block ends it.
        has_lines: values have lines of their own.
    """

    opening: str
    closing: str
    head: re.Pattern[str]
    parameter: re.Pattern[str]
    value_end: str
    end: str = ""
    has_lines: bool = False


_QWEN3_CODER = _Markup(
    "<tool_call>",
    "</tool_call>",
    re.compile(r"\s*<function=([^>\s]{1,256})>\s*"),
    re.compile(r"<parameter=([^>\s]{1,256})>"),
    "</parameter>",
    "</function>",
    has_lines=True,
)
_GLM = _Markup(
    "<tool_call>",
    "</tool_call>",
    re.compile(r"\s*([^\s<{]{1,256})\s*"),
    re.compile(r"<arg_key>([^<]{1,256})</arg_key>\s*<arg_value>"),
    "</arg_value>",
)
_MINIMAX = _Markup(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    re.compile(r'\s*<invoke name="([^"]{1,256})">\s*'),
    re.compile(r'<parameter name="([^"]{1,256})">'),
    "</parameter>",
    "</invoke>",
)
_DSML = [
    _Markup(
        f"<｜DSML｜{block}>",
        f"</｜DSML｜{block}>",
        re.compile(r'\s*<｜DSML｜invoke name="([^"]{1,256})">\s*'),
        re.compile(r'<｜DSML｜parameter name="([^"]{1,256})" string="(true|false)">'),
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
    )
    for block in ("function_calls", "tool_calls")  # V3.2, V4
]


_KINDS = {"true": {"type": "string"}, "false": {"type": "object"}}


def _parse_markup(markup: _Markup, text: str, tools: Sequence[Tool]) -> Parsed:
    """Parse calls with arguments as elements. A value is text, or JSON if the tool's schema declares another type."""
    functions = [tool.get("function", tool) for tool in tools]
    schemas = {function.get("name"): (function.get("parameters") or {}).get("properties") for function in functions}

    def parse_at(position: int) -> tuple[ToolCall, int] | None:
        head = markup.head.match(text, position)
        if head is None:
            return None
        position, schema, arguments = head.end(), schemas.get(head[1]) or {}, dict[str, Any]()
        while (parameter := markup.parameter.match(text, position)) is not None:
            end = text.find(markup.value_end, parameter.end())
            if end < 0:
                return None
            value, (key, *is_text) = text[parameter.end() : end], parameter.groups()
            if markup.has_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = _typed(value, _KINDS[is_text[0]] if is_text else schema.get(key))
            position = skip(text, end + len(markup.value_end))
        if not text.startswith(markup.end, position):
            return None
        call = _call(head[1], arguments)
        return None if call is None else (call, position + len(markup.end))

    return _between(text, markup.opening, markup.closing, parse_at, MAX_CALLS if markup.end else 1)


def _typed(value: str, schema: Any) -> Any:
    """Return the value that `value` has by its schema: text if this is allowed and nothing else fits."""
    types, written = _types_of(schema), _PYTHON_LITERALS.get(value, value)
    found = decode_json(written, 0) if types - {"string"} else None
    if found is None or skip(written, found[1]) != len(written):
        return value
    return value if "string" in types and not _JSON_TYPES[type(found[0])] & types else found[0]


_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
"""Qwen's templates write these values as Python does."""

_JSON_TYPES: Mapping[type, set[str]] = {
    bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, type(None): {"null"}, dict: {"object"},
    list: {"array"}, str: set(),
}  # fmt: skip


def _types_of(schema: Any, depth: int = 3) -> set[str]:
    """Return the types that a schema declares, those of its alternatives included; empty if it declares none."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    declared = schema.get("type", ["object"] if "$ref" in schema else [])
    types = {declared} if isinstance(declared, str) else set(declared)
    for key in ("anyOf", "oneOf", "allOf"):
        types |= {kind for part in schema.get(key) or () for kind in _types_of(part, depth - 1)}
    return types


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
