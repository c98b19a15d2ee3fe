"""Reads the columns of a row: a conversation, or prompt and completion."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from prime_rl.configs.training.sft_data import SFTDataConfig

Message = Mapping[str, Any]


class RowError(Exception):
    """A row is invalid. The caller adds the location of the row to the message."""


class Dialogue(NamedTuple):
    """A conversation."""

    messages: list[Message]  # in OpenAI's form
    first: int  # index of the first message that may be trained on; earlier messages are the prompt
    tools: Any  # definitions for the template, if any


class PromptCompletion(NamedTuple):
    """A prompt and a completion without roles."""

    prompt: str
    completion: str


def read_example(example: Mapping[str, Any], options: SFTDataConfig) -> Dialogue | PromptCompletion:
    """Read the content of a row. Raises RowError if columns are missing, or contain no text or messages."""
    tools = example.get("tools") or None
    column = options.messages_column or ("messages" if options.prompt_column is None else None)
    if column is not None and (options.messages_column or column in example):
        return Dialogue(_messages(_value(example, column), column), 0, tools)
    prompt_column, completion_column = _columns(example, options)
    prompt, completion = _value(example, prompt_column), _value(example, completion_column)
    if isinstance(prompt, str) and isinstance(completion, str):
        if not options.as_messages:
            return PromptCompletion(prompt, completion)
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
    for pair in (("prompt", "completion"), ("question", "answer")):
        if all(column in example for column in pair):
            return pair
    raise RowError(
        f"the columns are {sorted(map(str, example))}; required are `messages`, or `prompt` and `completion` (both "
        "text or both lists of messages); or set data.prompt_column and data.completion_column"
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
    # Tables fill missing keys of a message with None, which a template would treat as present.
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _kind(value: Any) -> str:
    if value is None or value == []:
        return "nothing" if value is None else "an empty list"
    name = type(value).__name__
    return {"str": "text", "list": "a list"}.get(name, name)
