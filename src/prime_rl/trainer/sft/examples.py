"""What the rows of a data set mean: a conversation, or prompt and completion. Every defect is named."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prime_rl.configs.sft_data import SFTDataConfig

Message = Mapping[str, Any]

_PAIRS = (("prompt", "completion"), ("question", "answer"))


class RowError(Exception):
    """A row that cannot be used. The message says why; whoever knows where the row stands adds that."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation.

    Attributes:
        messages: in OpenAI's form.
        first: index of the first message that may be learned; those before it are the prompt.
        tools: definitions that the template shows; None without.
    """

    messages: list[Message]
    first: int
    tools: Any


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and a completion without roles."""

    prompt: str
    completion: str


def read_example(example: Mapping[str, Any], options: SFTDataConfig) -> Dialogue | Text:
    """Find the content of a row by its columns.

    Raises:
        RowError: the columns are others, or hold something else than text or messages.
    """
    tools = example.get("tools") or None
    column = options.messages_column or ("messages" if options.prompt_column is None else None)
    if column is not None and (options.messages_column or column in example):
        return Dialogue(_messages(_value(example, column), column), 0, tools)
    prompt_column, completion_column = _columns(example, options)
    prompt, completion = _value(example, prompt_column), _value(example, completion_column)
    if isinstance(prompt, str) and isinstance(completion, str):
        if not options.as_messages:
            return Text(prompt, completion)
        pair: list[Message] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return Dialogue(pair, 0, tools)
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(prompt, prompt_column)
        return Dialogue([*before, *_messages(completion, completion_column)], len(before), tools)
    raise RowError(
        f"{prompt_column} and {completion_column} must both be text or both lists of messages, not "
        f"{_kind(prompt)} and {_kind(completion)}"
    )


def _columns(example: Mapping[str, Any], options: SFTDataConfig) -> tuple[str, str]:
    if options.prompt_column is not None and options.completion_column is not None:
        return options.prompt_column, options.completion_column
    for pair in _PAIRS:
        if all(column in example for column in pair):
            return pair
    raise RowError(
        f"the columns are {sorted(map(str, example))}; it needs `messages`, or `prompt` and `completion` (both text or "
        "both lists of messages); or name yours with data.prompt_column and data.completion_column"
    )


def _value(example: Mapping[str, Any], column: str) -> Any:
    if column not in example:
        raise RowError(f"there is no column {column!r}, only {sorted(map(str, example))}")
    return example[column]


def _messages(value: Any, column: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise RowError(f"{column} must be a list of messages, not {_kind(value)}")
    for i, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RowError(f"{column}[{i}] must have a `role` and a `content`, but is {str(message)[:80]!r}")
        content = message.get("content")
        if not isinstance(content, str | list) and not message.get("tool_calls"):
            raise RowError(f"{column}[{i}].content must be text, not {_kind(content)}")
    # Tables fill what a message lacks with None, which a template would take for something that is there.
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _kind(value: Any) -> str:
    if value is None or value == []:
        return "nothing" if value is None else "an empty list"
    name = type(value).__name__
    return {"str": "text", "list": "a list"}.get(name, name)
