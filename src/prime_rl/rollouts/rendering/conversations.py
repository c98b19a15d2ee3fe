"""Reads stored conversations: the forms of OpenAI, ShareGPT, Alpaca, xLAM and Hermes, and prompt-completion pairs.

All become messages in normal form (`messages.normalise`). Values may be JSON text, as in CSV files.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from prime_rl.configs.training.sft_data import SFTDataConfig
from prime_rl.core.errors import translate_error
from prime_rl.core.terminal_escape import replace_surrogates
from prime_rl.rollouts.rendering.messages import Message, decode_json, normalise, role_of, skip, text_of

_CHAT_COLUMNS = ("messages", "conversations", "conversation")
_PAIRS = (
    ("prompt", "completion"), ("question", "answer"), ("query", "answers"),
    ("instruction", "output"), ("instruction", "response"), ("prompt", "response"),
)  # fmt: skip
_TOOL_COLUMNS = ("tools", "tool_defs", "functions")
_ARGUMENT_COLUMNS = ("chat_template_kwargs", "chat_template_args")
_KEYS = {"from": "role", "value": "content", "reasoning": "reasoning_content", "thinking": "reasoning_content"}
"""Keys of a message in other formats."""
_REASONING = {"reasoning", "thinking"}  # kept, because some templates read them
_KNOWN = {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "function_call"}
_FLAGS = ("weight", "loss", "loss_mask", "trainable", "train", "train_on_turn")
_MEDIA = re.compile("<(image|video|audio)>")
"""Places of the columns `image`, `images` ... in a text (LLaVA, LLaMA-Factory)."""
_TYPES = {
    "str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object",
    "tuple": "array", "set": "array",
}  # fmt: skip


class RowError(Exception):
    """A row is invalid. The caller adds the location of the row to the message."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation to train on.

    Attributes:
        messages: in normal form; keys of other kinds are kept for the chat template.
        first: index of the first message that may be trained on; earlier messages are the prompt.
        tools: definitions in OpenAI's form; None without tools.
        template_args: further variables of the chat template.
        excluded: indices of messages that are not trained on, by their `weight` or `loss_mask` of 0.
        included: indices of messages whose `weight` or `loss_mask` is 1.
        other_keys: keys of messages that are not part of the normal form.
    """

    messages: list[Message]
    first: int = 0
    tools: list[Any] | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    excluded: frozenset[int] = frozenset()
    included: frozenset[int] = frozenset()
    other_keys: frozenset[str] = frozenset()


class PromptCompletion(NamedTuple):
    """A prompt and a completion without roles."""

    prompt: str
    completion: str


class TrackedRow(Mapping[str, Any]):
    """A row that records which of its columns are read."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row, self._read = row, set[str]()

    def __getitem__(self, column: str) -> Any:
        self._read.add(column)
        return self._row[column]

    def __contains__(self, column: object) -> bool:
        return column in self._row

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)

    def has_value(self, column: str) -> bool:
        """Whether the column contains something; a table has None where other rows have a value."""
        return self._row.get(column) not in (None, "", [])

    def unread(self) -> list[str]:
        """Return the columns with values that were not read, sorted."""
        return sorted(str(name) for name in self._row if name not in self._read and self.has_value(name))


def read_row(row: Mapping[str, Any], options: SFTDataConfig) -> Conversation | PromptCompletion:
    """Read the content of a row. Raises RowError if columns are missing, or contain no text or messages."""
    row = row if isinstance(row, TrackedRow) else TrackedRow(row)
    prompt_column, completion_column = _columns(row, options)
    if completion_column is None:
        return _complete(_read_messages(_value(row, prompt_column), prompt_column), row)
    prompt, completion = _value(row, prompt_column), _value(row, completion_column)
    if _is_messages(parsed := [_parse(prompt), _parse(completion)]):
        read = _read_messages([*parsed[0], *parsed[1]], f"{prompt_column} and {completion_column}")
        return _complete(replace(read, first=len(parsed[0])), row)
    tools = next((name for name in _TOOL_COLUMNS if row.has_value(name)), None)
    is_query = prompt_column == "query"
    is_call = (is_query and isinstance(completion, str)) or (
        (is_query or tools is not None) and _calls_of(completion) is not None
    )
    if isinstance(prompt, str) and (isinstance(completion, str) or is_call):
        is_alpaca = prompt_column == "instruction" and options.prompt_column is None
        if not (options.as_messages or is_alpaca or is_call):
            return PromptCompletion(prompt, completion)
        turns = _earlier_turns(row) if is_alpaca else []
        text = "\n".join(filter(None, (prompt, _text(row, "input", "context")))) if is_alpaca else prompt
        turns = [*turns, {"role": "user", "content": text}, *_answer(completion, is_call)]
        return _complete(_read_messages(turns, f"{prompt_column} and {completion_column}"), row)
    raise RowError(
        f"{prompt_column} and {completion_column} must both be text or both lists of messages, not "
        f"{_kind(prompt)} and {_kind(completion)}"
    )


def _columns(row: TrackedRow, options: SFTDataConfig) -> tuple[str, str | None]:
    """Return the columns of prompt and completion, or that of the conversation and None."""
    if options.messages_column is not None:
        return options.messages_column, None
    if options.prompt_column is not None and options.completion_column is not None:
        return options.prompt_column, options.completion_column
    known: list[tuple[str, str | None]] = [*((name, None) for name in _CHAT_COLUMNS), *_PAIRS]
    present = [pair for pair in known if all(column is None or column in row for column in pair)]
    filled = [pair for pair in present if all(column is None or row.has_value(column) for column in pair)]
    for pair in [*filled, *present]:
        return pair
    raise RowError(
        f"the columns are {sorted(map(str, row))}; required are `messages`, or `prompt` and `completion` (both "
        "text or both lists of messages); or set data.prompt_column and data.completion_column"
    )


def _is_messages(values: Sequence[Any]) -> bool:
    return all(
        isinstance(value, list)
        and value
        and all(isinstance(one, Mapping) and {*one} & {"role", "from"} for one in value)
        for value in values
    )


def _earlier_turns(row: TrackedRow) -> list[dict[str, Any]]:
    """Return the messages in Alpaca's `history`, a list of pairs."""
    pairs = _parse(row["history"]) if row.has_value("history") else []
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise RowError("history must be a list of pairs of instruction and response")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def _answer(completion: Any, is_call: bool) -> list[dict[str, Any]]:
    """Return the assistant's message, a text or tool calls; none for an empty list of calls."""
    if not is_call:
        return [{"role": "assistant", "content": completion}]
    calls = _calls_of(completion)
    content = completion if calls is None else None
    return [] if calls == [] else [{"role": "assistant", "content": content, "tool_calls": calls}]


def _calls_of(value: Any) -> list[Any] | None:
    """Return the tool calls of an answer that is a call or a list of them, or JSON text; None for other answers."""
    calls = _parse(value)
    calls = [calls] if isinstance(calls, Mapping) else calls
    is_list = isinstance(calls, list) and all(
        isinstance(one, Mapping) and {*one} >= {"name", "arguments"} for one in calls
    )
    return calls if is_list else None


def _text(row: TrackedRow, *columns: str) -> str:
    """Return the text of the first of these columns that has a value; "" if none has."""
    column = next(filter(row.has_value, columns), None)
    if column is None:
        return ""
    if not isinstance(value := row[column], str | list):
        raise RowError(f"{column} must be text, not {_kind(value)}")
    _check_characters(value, column)
    with translate_error(ValueError, lambda error: RowError(f"{column}: {error}")):
        return text_of(value)


def _check_characters(value: Any, where: str) -> None:
    if replace_surrogates(value) != value:
        raise RowError(f"{where}: the text contains half of a surrogate pair (\\ud800 to \\udfff), not a character")


def _value(row: TrackedRow, column: str) -> Any:
    if column not in row:
        raise RowError(f"there is no column {column!r}, only {sorted(map(str, row))}")
    return row[column]


def _kind(value: Any) -> str:
    if value is None or value == []:
        return "nothing" if value is None else "an empty list"
    name = type(value).__name__
    return {"str": "text", "list": "a list"}.get(name, name)


def _parse(value: Any) -> Any:
    """Return the content of JSON text; other values, and other text, as they are."""
    found = decode_json(value, 0) if isinstance(value, str) else None
    return value if found is None or skip(value, found[1]) != len(value) else found[0]


def _complete(conversation: Conversation, row: TrackedRow) -> Conversation:
    """Add the tools, the system message and the template's variables of other columns."""
    messages, system = conversation.messages, _text(row, "system", "system_prompt")
    kinds = {kind for message in messages for kind in _MEDIA.findall(message["content"])}
    if shown := [name for kind in sorted(kinds) for name in (kind, f"{kind}s") if row.has_value(name)]:
        raise RowError(f"the messages refer to the column {shown[0]!r}; only text is supported")
    if system and messages[0]["role"] not in ("system", "developer"):
        conversation = replace(
            conversation,
            messages=[{"role": "system", "content": system}, *messages],
            first=conversation.first + (conversation.first > 0),
            excluded=frozenset(i + 1 for i in conversation.excluded),
            included=frozenset(i + 1 for i in conversation.included),
        )
    args: Any = next((value for name in _ARGUMENT_COLUMNS if (value := _parse(row.get(name)))), {})
    if not isinstance(args, Mapping):
        raise RowError(f"chat_template_kwargs must be an object, not {_kind(args)}")
    tools = next((tools for name in _TOOL_COLUMNS if (tools := _read_tools(row.get(name)))), None)
    # Hermes' rows describe the tools in the text of the system message; the template would repeat them.
    described = any(
        m["role"] == "system" and "<tools>" in m["content"] and "</tools>" in m["content"] for m in messages
    )
    _remove_filled_arguments(messages, tools or [])
    return replace(conversation, tools=None if described else tools, template_args=args)


def _remove_filled_arguments(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
    """Remove arguments of None that the called tool does not have: another row of the table has them."""
    functions = [tool["function"] for tool in tools]
    schemas = {function.get("name"): function.get("parameters") for function in functions}
    for call in (call["function"] for message in messages for call in message.get("tool_calls", ())):
        schema = schemas.get(call["name"])
        if isinstance(schema, Mapping) and isinstance(known := schema.get("properties", {}), Mapping):
            arguments = call["arguments"]
            call["arguments"] = {key: item for key, item in arguments.items() if item is not None or key in known}


def _read_tools(value: Any) -> list[Any] | None:
    tools = _parse(value)
    if not tools:
        return None
    tools = without_none([_parse(tool) for tool in (tools if isinstance(tools, list) else [tools])])
    functions: list[Any] = [
        (_parse(tool.get("function")) or tool) if isinstance(tool, Mapping) else None for tool in tools
    ]
    if not all(isinstance(function, Mapping) for function in functions):
        raise RowError(f"tools must be a list of definitions, or JSON text of one, but is {str(value)[:80]!r}")
    for function in functions:
        if not isinstance(function.get("name"), str):
            raise RowError(f"a tool needs a `name`, but is {str(function)[:80]!r}")
    return [
        _wrap(tool) if function is tool else {**tool, "function": _with_schema(function)}
        for tool, function in zip(tools, functions, strict=True)
    ]


def _with_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Decode a schema that is JSON text, and name it as OpenAI does."""
    schema = _parse(function.get("parameters", function.get("input_schema")))
    kept = {key: value for key, value in function.items() if key != "input_schema"}
    return kept if schema is None else {**kept, "parameters": schema}


def without_none(value: Any) -> Any:
    """Remove the keys of objects that a table filled with None because other rows have them."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def _wrap(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAI's form of a bare function; xLAM's has Python types in place of a JSON schema."""
    function = _with_schema({key: value for key, value in tool.items() if key != "type"})
    schema = function.get("parameters")
    has_types = isinstance(schema, Mapping) and all(isinstance(one, Mapping) for one in schema.values())
    if has_types and schema and not ({*schema} == {"properties"} and "type" not in schema["properties"]):
        is_optional = {name: "optional" in str(one.get("type")).lower() for name, one in schema.items()}
        optional = [name for name, one in schema.items() if "default" in one or is_optional[name]]
        properties = {name: {**one, "type": _json_type(one.get("type"))} for name, one in schema.items()}
        required = [name for name in schema if name not in optional]
        function["parameters"] = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": function}


def _json_type(name: Any) -> Any:
    base = re.sub(r"^optional\[(.*)\]$", r"\1", str(name).strip().lower())
    return _TYPES.get(base.split(",")[0].split("[")[0].strip(), name or "string")


def _read_messages(value: Any, column: str) -> Conversation:
    value = _parse(value)
    if not isinstance(value, list) or not value:
        raise RowError(f"{column} must be a list of messages, not {_kind(value)}")
    marks, other = dict[int, bool](), set[str]()
    messages: list[Message] = []
    for i, stored in enumerate(value):
        where = f"{column}[{i}]"
        if not isinstance(stored, Mapping):
            raise RowError(f"{where} must have a `role` and a `content`, but is {str(stored)[:80]!r}")
        # Tables fill missing keys with None, which a template would treat as present.
        message = {str(key): item for key, item in stored.items() if item is not None}
        for key, name in _KEYS.items():
            if key in message and name not in message:
                message[name] = message[key] if key in _REASONING else message.pop(key)
        if not isinstance(message.get("role"), str):
            raise RowError(f"{where} must have a `role` and a `content`, but is {str(stored)[:80]!r}")
        if flags := {key: message[key] for key in _FLAGS if key in message}:
            marks[i] = _is_trained(flags, where)
        more = {key: item for key, item in message.items() if key not in _KNOWN and key not in _FLAGS}
        messages.append({**more, **_read_message(message, where)})
        other |= {*more} - _REASONING
    excluded = frozenset(i for i, is_trained in marks.items() if not is_trained)
    return Conversation(messages, excluded=excluded, included=frozenset(marks) - excluded, other_keys=frozenset(other))


def _is_trained(flags: Mapping[str, Any], where: str) -> bool:
    for key, flag in flags.items():
        if flag not in (0, 1):
            raise RowError(f"{where}.{key} must be 0 or 1, not {str(flag)[:40]!r}")
    return all(flags.values())


def _read_message(message: Message, where: str) -> Message:
    """Return the normal form of a message whose keys are standard."""
    content, role = message.get("content"), message["role"].strip().lower().replace("-", "_")
    calls = _parse(message.get("tool_calls")) or []
    if role in ("function_call", "tool_call") and isinstance(said := _parse(content), Mapping | list) and not calls:
        calls, content = said, None  # ShareGPT: the content is the call
    elif isinstance(legacy := _parse(message.get("function_call")), Mapping) and not calls:
        calls = legacy
    calls = calls if isinstance(calls, list) else [calls]
    if content is None and "refusal" in message:
        content = message["refusal"]
    can_be_empty = calls or "reasoning_content" in message or role_of(role) == "tool"
    if not isinstance(content, str | list) and not (content is None and can_be_empty):
        raise RowError(f"{where}.content must be text, not {_kind(content)}")
    with translate_error(ValueError, lambda error: RowError(f"{where}: {error}")):
        read = {**message, "content": text_of(content), "tool_calls": [_read_call(call, where) for call in calls]}
        _check_characters([message, read], where)
        return normalise([read])[0]


def _read_call(call: Any, where: str) -> Mapping[str, Any]:
    call = _parse(call)
    function = _parse(call.get("function") or call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(f"{where}.tool_calls must contain calls with a `name`, but one is {str(call)[:80]!r}")
    arguments = function.get("arguments", function.get("parameters"))
    arguments = {} if arguments is None or str(arguments).strip() in ("", "null") else _parse(arguments)
    if not isinstance(arguments, Mapping):
        raise RowError(
            f"{where}: the arguments of the call of {function['name']} must be an object or its JSON text, but are "
            f"{str(arguments)[:80]!r}"
        )
    with translate_error((TypeError, ValueError), lambda error: RowError(f"{where}.tool_calls is not JSON: {error}")):
        json.dumps(arguments, allow_nan=False)
    return {"id": call.get("id"), "function": {"name": function["name"], "arguments": arguments}}
