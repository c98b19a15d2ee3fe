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
    return _between(text, "<tool_call>", "</tool_call>", _json_call, calls_per_block=1)


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

    def parse_at(text: str, start: int) -> tuple[ToolCall | None, int]:
        if (head := _KIMI_HEAD.match(text, start)) is None:
            return None, start
        call, end = _arguments_call(text, head[2], head.end(), "<|tool_call_end|>")
        return call and replace(call, id=head[1] if ":" in head[1] else ""), end

    return _between(text, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", parse_at)


def deepseek_v3(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse the calls of DeepSeek V3, R1 and V3.1 (special tokens around JSON), and of V3.2 and V4 (DSML elements)."""

    def parse_at(text: str, start: int) -> tuple[ToolCall | None, int]:
        if (head := _DEEPSEEK_HEAD.match(text, start)) is None:
            return None, start
        return _arguments_call(text, head[1] or head[2], head.end(), "<｜tool▁call▁end｜>")

    if (markup := next((markup for markup in _DSML if markup.opening in text), None)) is not None:
        return _parse_markup(markup, text, tools)
    return _between(text, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", parse_at)


def gpt_oss(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse the messages of gpt-oss (Harmony): analysis is reasoning, final and commentary are content.

    The body of a call that is malformed, or made without `tools`, is content.
    """
    if "<|message|>" not in text:
        return Parsed("" if "<|channel|>" in text else text)  # cut in its header
    parts: dict[str, list[str]] = {"content": [], "analysis": []}
    calls: list[ToolCall] = []
    for message in text.split("<|start|>"):
        header, _, rest = message.partition("<|message|>")
        body = _HARMONY_END.split(rest, maxsplit=1)[0]
        channel, recipient = _HARMONY_CHANNEL.search(header), _HARMONY_RECIPIENT.search(header)
        call = _whole_call(recipient[1], body) if recipient and tools and len(calls) < MAX_CALLS else None
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
        call, position = _json_call(body, position)
        if call is None:
            break
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

# Text of which a template with this format contains one, and what else it needs.
_MARKERS: list[tuple[Parser, tuple[str, ...], str]] = [
    (kimi_k2, ("<|tool_calls_section_begin|>",), ""),
    (deepseek_v3, ("<｜tool▁calls▁begin｜>", "｜DSML｜"), ""),
    (minimax_m2, ("<minimax:tool_call>",), ""),
    (glm45, ("<arg_key>",), "<tool_call>"),
    (gpt_oss, ("<|channel|>",), "<|message|>"),
    (mistral, ("[TOOL_CALLS]",), ""),
    (qwen3_coder, ("<function=",), "<tool_call>"),
    (hermes, ("<tool_call>",), ""),
    (llama3_json, ("<|eot_id|>", "<|eot|>"), '"parameters": '),
]


def parser_of_template(template: str) -> Parser | None:
    """Return the parser of the calls that a chat template writes; None if it has no format that is known."""
    for parser, markers, other in _MARKERS:
        if other in template and any(marker in template for marker in markers):
            return parser
    return None


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


_ParseAt = Callable[[str, int], tuple[ToolCall | None, int]]
"""(text, position) -> a call and its end, or None and the position up to which there is none."""


def _between(
    text: str, opening: str, closing: str, parse_at: _ParseAt, calls_per_block: int = MAX_CALLS, needs_end: bool = False
) -> Parsed:
    """Parse blocks of calls. A block that does not consist of calls stays content.

    Unless `needs_end`, the last block may lack its end.
    """
    calls: list[ToolCall] = []
    kept: list[str] = []
    position = 0
    start = text.find(opening)
    for _ in range(MAX_CALLS):
        if start < 0 or len(calls) >= MAX_CALLS:
            break
        found, call, end = list[ToolCall](), None, start + len(opening)
        while len(found) < calls_per_block:
            call, end = parse_at(text, end)
            if call is None:
                break
            found.append(call)
            end = skip(text, end)
        if not found or not (text.startswith(closing, end) or (end == len(text) and not needs_end)):
            start = text.find(opening, end)
            continue
        calls += found
        kept.append(text[position:start].rstrip())
        position = min(end + len(closing), len(text))
        start = text.find(opening, position)
    if not calls:
        return Parsed(text)
    return Parsed("".join([*kept, text[position:]]).strip(), tuple(calls))


def _json_call(text: str, position: int) -> tuple[ToolCall | None, int]:
    found = decode_json(text, position)
    if found is None or not isinstance(found[0], dict):
        return None, position
    value, end = found
    call = _call(value.get("name"), value.get("arguments", value.get("parameters")))
    return (call, end) if call is not None else (None, position)


def _call(name: Any, arguments: Any) -> ToolCall | None:
    """Return a call; None if its parts have wrong types or cannot be encoded as UTF-8 JSON."""
    if not (isinstance(name, str) and 0 < len(name) <= MAX_NAME and isinstance(arguments, dict)):
        return None
    with suppress(ValueError):  # an infinite number, or half of a surrogate pair
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + written).encode()
        return ToolCall(name, written)
    return None


def _whole_call(name: str, body: str) -> ToolCall | None:
    found = decode_json(body, 0) if body.strip() else ({}, len(body))
    return _call(name, found[0]) if found is not None and skip(body, found[1]) == len(body) else None


def _arguments_call(text: str, name: str, position: int, closing: str) -> tuple[ToolCall | None, int]:
    """Parse the JSON object of arguments at `position` up to `closing`; DeepSeek V3 writes it in a block of code."""
    found = ({}, position) if text.startswith(closing, skip(text, position)) else decode_json(text, position)
    call = None if found is None else _call(name, found[0])
    if found is None or call is None:
        return None, position
    end = skip(text, found[1], "` \n\t\r")
    if text.startswith(closing, end):
        return call, end + len(closing)
    return (call if end == len(text) else None), end


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

    def parse_at(text: str, position: int) -> tuple[ToolCall | None, int]:
        head = markup.head.match(text, position)
        if head is None:
            return None, position
        position, values = head.end(), dict[str, tuple[str, list[str]]]()
        while (parameter := markup.parameter.match(text, position)) is not None:
            end = text.find(markup.value_end, parameter.end())
            if end < 0:
                return None, parameter.end()
            key, *is_text = parameter.groups()
            values[key] = text[parameter.end() : end], is_text
            position = skip(text, end + len(markup.value_end))
        if not text.startswith(markup.end, position):
            return None, position
        root = _parameters_of(head[1], tools)
        properties = root.get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        arguments = dict[str, Any]()
        for key, (value, is_text) in values.items():
            if markup.has_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = _typed(value, _types_of(_KINDS[is_text[0]] if is_text else schemas.get(key), root))
        call = _call(head[1], arguments)
        return call, position + len(markup.end)

    calls_per_block = MAX_CALLS if markup.end else 1
    return _between(text, markup.opening, markup.closing, parse_at, calls_per_block, needs_end=not markup.end)


def _parameters_of(name: str, tools: Sequence[Tool]) -> Mapping[str, Any]:
    functions = [tool.get("function", tool) for tool in tools]
    found = (one.get("parameters") for one in functions if isinstance(one, Mapping) and one.get("name") == name)
    parameters = next(found, None)
    return parameters if isinstance(parameters, Mapping) else {}


def _typed(value: str, types: set[str]) -> Any:
    """Return the value that `value` has by the types of its schema: text if this is allowed and nothing else fits."""
    written = _PYTHON_LITERALS.get(value, value)
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


def _types_of(schema: Any, root: Mapping[str, Any], depth: int = 4) -> set[str]:
    """Return the types that a schema declares, those of its alternatives included; empty if it declares none.

    `root` is the schema in which its references are.
    """
    if not isinstance(schema, Mapping) or not depth:
        return set()
    declared = schema.get("type")
    types = {kind for kind in ([declared] if isinstance(declared, str) else _items(declared)) if isinstance(kind, str)}
    if not types:
        for value in _items(schema.get("enum")):
            types |= {"string"} if isinstance(value, str) else _JSON_TYPES.get(type(value), set())
    for key in ("anyOf", "oneOf", "allOf"):
        for part in _items(schema.get(key)):
            types |= _types_of(part, root, depth - 1)
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        target: Any = root
        for name in reference[2:].split("/"):
            target = target.get(name) if isinstance(target, Mapping) else None
        types |= _types_of(target, root, depth - 1)
    return types


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _mistral_list(text: str) -> tuple[ToolCall, ...]:
    found = decode_json(text, 0)
    if found is None or not isinstance(found[0], list) or text[found[1] :].strip() or len(found[0]) > MAX_CALLS:
        return ()
    items = [item if isinstance(item, dict) else {} for item in found[0]]
    calls = [_with_id(_call(item.get("name"), item.get("arguments")), item.get("id")) for item in items]
    return tuple(call for call in calls if call is not None) if None not in calls else ()


def _mistral_named(text: str) -> tuple[ToolCall, ...]:
    calls: list[ToolCall] = []
    for part in text.split("[TOOL_CALLS]", MAX_CALLS):
        head, _, arguments = part.partition("[ARGS]")
        name, _, call_id = head.partition("[CALL_ID]")
        found = decode_json(arguments, 0)
        call = None if found is None or arguments[found[1] :].strip() else _call(name.strip(), found[0])
        if call is None:
            return ()
        calls.append(_with_id(call, call_id.strip()) or call)
    return tuple(calls)


def _with_id(call: ToolCall | None, call_id: Any) -> ToolCall | None:
    is_id = isinstance(call_id, str) and re.fullmatch(r"[A-Za-z0-9]{9}", call_id)  # the format of Mistral
    return call and replace(call, id=call_id if is_id else "")
