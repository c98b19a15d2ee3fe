"""The messages that classic environments, reward functions and graders get: dictionaries that also have attributes.

Before 0.1.12 verifiers passed dictionaries, and packages of that time test `isinstance(message, dict)` or index keys.
Its present classes are pydantic models, which verifiers and newer packages test for, and whose attributes they read.
`MessageDict` serves both: it is a dictionary, and `isinstance` finds the model that it stands for in `__class__`.

`patch_messages` lets verifiers create such messages; `use_message_dicts` replaces those that an environment has made.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ValidationError
from typing_extensions import Self  # noqa: UP035 - verifiers 0.1 runs on Python 3.10, too
from verifiers import types
from verifiers.utils import message_utils, response_utils

_ALWAYS = "content"
"""The key of a message that is there also if it is None."""


class MessageDict(dict[str, Any]):
    """A message, or a part of one, as a dictionary with attributes.

    Keys whose value is None are left out, as in messages of OpenAI's API; as attributes, and by `[]`, they are None.
    Methods of the model, such as `model_dump`, are those of a new object of `model`.
    """

    __slots__ = ("_model",)
    _model: type[BaseModel]

    def __init__(self, fields: Any = (), /, **more: Any) -> None:
        """Make a message as `dict` does, for code that rebuilds one by its type; the role selects the class."""
        super().__init__(fields, **more)
        role = dict.get(self, "role")
        object.__setattr__(self, "_model", _BY_ROLE.get(role if isinstance(role, str) else None, types.CustomBaseModel))

    @classmethod
    def of(cls, model: type[BaseModel], fields: Mapping[str, Any]) -> Self:
        """Stand for an object of a verifiers class with these fields."""
        made = cls(fields)
        object.__setattr__(made, "_model", model)
        return made

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class that `isinstance` finds, besides `dict`."""
        return self._model

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        """The fields of the model, which pydantic reads if a model of foreign code contains this."""
        return {name: self[name] for name in (*self._model.model_fields, *self)}

    @property
    def __pydantic_extra__(self) -> dict[str, Any]:
        return {name: value for name, value in self.items() if name not in self._model.model_fields}

    @property
    def __pydantic_fields_set__(self) -> set[str]:
        return set(self)

    def __missing__(self, key: str) -> Any:
        if key in self._model.model_fields:
            return None
        raise KeyError(key)

    def __getattr__(self, name: str) -> Any:
        with suppress(KeyError):
            return self[name]
        if name.startswith("__") or not hasattr(self._model, name):
            raise AttributeError(f"{self._model.__name__!r} object has no attribute {name!r}")
        fields = _plain(self)
        try:
            return getattr(self._model.model_validate(fields), name)
        except ValidationError:  # an environment's own message that verifiers would not accept
            return getattr(self._model.model_construct(**fields), name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BaseModel):
            return _without_none(_plain(self)) == _without_none(_plain(other))
        return super().__eq__(other)

    __hash__ = None

    def copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """Return a shallow copy with changed fields."""
        return type(self).of(self._model, {**self, **(update or {})})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self).of, (self._model, dict(self))


class _Function(types.CustomBaseModel):
    name: str
    arguments: str


class ToolCallDict(MessageDict):
    """A tool call in the forms of verifiers (`name`, `arguments`) and OpenAI (`function.name`, `type`).

    The keys of one form are stored, those of the other are derived.
    """

    __slots__ = ()

    def __missing__(self, key: str) -> Any:
        if key == "type":
            return "function"
        if key == "function" and dict.__contains__(self, "name"):
            return MessageDict.of(_Function, {"name": self["name"], "arguments": self["arguments"]})
        if key in ("name", "arguments") and dict.__contains__(self, "function"):
            return self["function"].get(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in ("type", "function", "name", "arguments")

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of either form."""
        try:
            return self[key]
        except KeyError:
            return default


_BY_ROLE: dict[Any, type[BaseModel]] = {
    "text": types.TextMessage,
    "system": types.SystemMessage,
    "user": types.UserMessage,
    "assistant": types.AssistantMessage,
    "tool": types.ToolMessage,
}
_MODELS: tuple[type[BaseModel], ...] = tuple(_BY_ROLE.values())
_BY_TYPE: dict[Any, type[BaseModel]] = {
    "text": types.TextContentPart,
    "image_url": types.ImageUrlContentPart,
    "input_audio": types.InputAudioContentPart,
}
_INSIDE: dict[str, type[BaseModel]] = {
    "image_url": types.ImageUrlSource,
    "input_audio": types.InputAudioSource,
    "function": _Function,
}
"""Classes of the dictionaries inside parts and tool calls, by key."""


def message_dict(message: Any) -> Any:
    """Return a message of verifiers, or a dictionary with a role, as a `MessageDict`; another object unchanged."""
    if type(message) is MessageDict:
        return message
    if isinstance(message, _MODELS):
        return _convert(type(message), message)
    if type(message) is dict and isinstance(message.get("role"), str) and message["role"] in _BY_ROLE:
        return _convert(_BY_ROLE[message["role"]], message)
    return message


def _convert(model: type[BaseModel], value: Any) -> MessageDict:
    """Return a dictionary or model as a `MessageDict`, with all that is inside."""
    if isinstance(value, BaseModel):
        fields = {**value.__dict__, **(value.__pydantic_extra__ or {})}
        fields = {name: inner for name, inner in fields.items() if inner is not None or name == _ALWAYS}
    else:
        fields = dict(value)
    for name, inner in fields.items():
        if name == "tool_calls" and isinstance(inner, list | tuple):
            fields[name] = [_convert_inside(types.ToolCall, call) for call in inner]
        elif name == "content" and isinstance(inner, list):
            fields[name] = [_convert_part(part) for part in inner]
        elif name in _INSIDE:
            fields[name] = _convert_inside(_INSIDE[name], inner)
    return (ToolCallDict if issubclass(model, types.ToolCall) else MessageDict).of(model, fields)


def _convert_part(part: Any) -> Any:
    kind = part.get("type") if type(part) is dict and isinstance(part.get("type"), str) else None
    return _convert_inside(_BY_TYPE.get(kind, types.GenericContentPart), part)


def _convert_inside(model: type[BaseModel], value: Any) -> Any:
    if isinstance(value, MessageDict) or not (type(value) is dict or isinstance(value, types.CustomBaseModel)):
        return value
    return _convert(type(value) if isinstance(value, BaseModel) else model, value)


def _plain(value: Any) -> Any:
    """Return dictionaries and models as plain dictionaries."""
    if type(value) is ToolCallDict:  # verifiers' form
        value = {"name": value["name"], "arguments": value["arguments"], **value}
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value.model_dump() if isinstance(value, types.CustomBaseModel) else value


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def message_dicts(messages: Any) -> Any:
    """Return a list of messages with each as a `MessageDict`, the same list if they are; another value unchanged."""
    if not isinstance(messages, list) or all(type(message) is MessageDict for message in messages):
        return messages
    return [message_dict(message) for message in messages]


def use_message_dicts(state: Any) -> None:
    """Replace the messages in the prompt, the completion and the steps of a state."""
    for holder in (state, *(state.get("trajectory") or ())):
        for name in ("prompt", "completion"):
            if isinstance(messages := holder.get(name), list) and (changed := message_dicts(messages)) is not messages:
                holder[name] = changed


def patch_messages() -> None:
    """Let the functions with which verifiers makes messages return `MessageDict`s, in all its modules."""
    normalize, parse = message_utils.normalize_messages, response_utils.parse_response_message

    def normalize_messages(value: Any, *, field_name: str = "messages") -> list[Any]:
        if isinstance(value, str):
            return [message_dict(message) for message in normalize(value, field_name=field_name)]
        return [
            message if type(message) is MessageDict else message_dict(normalize([message], field_name=field_name)[0])
            for message in value
        ]

    def maybe_normalize_messages(value: Any, *, field_name: str = "messages") -> list[Any]:
        if isinstance(value, list) and message_dicts(value) is value:
            return value
        return normalize_messages(value, field_name=field_name)

    async def parse_response_message(response: Any) -> list[Any]:
        return [message_dict(message) for message in await parse(response)]

    def equals(self: types.CustomBaseModel, other: object) -> Any:
        return NotImplemented if type(other) in (MessageDict, ToolCallDict) else compare(self, other)

    compare: Callable[..., Any] = types.CustomBaseModel.__eq__
    types.CustomBaseModel.__eq__ = equals
    _replace(normalize, normalize_messages)
    _replace(message_utils.maybe_normalize_messages, maybe_normalize_messages)
    _replace(parse, parse_response_message)


def _replace(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Replace a function of verifiers in its module and in those that have imported it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("verifiers.") and vars(module).get(original.__name__) is original:
            setattr(module, original.__name__, replacement)
