"""Warnings about keys without effect, rejected secrets, and one-line explanations of validation errors."""

import os
import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from prime_rl.core.errors import ConfigError
from prime_rl.loading.base_config import NO_EFFECT, BaseConfig
from prime_rl.loading.provenance import ConfigState
from prime_rl.loading.schema import Kind, Path, add_descriptions, dotted, find, nodes_of, resolve, tag_of

_SECRET = re.compile(
    r"(^|_)(api_?key|access_?key|access_token|auth_token|hf_token|secret|password|authorization)$", re.I
)
_SECRET_VARIABLE = re.compile(r"(^|_)(key|token|secret|password)(_|$)", re.I)
_MIN_SECRET_LENGTH = 8
"""Shorter values of such variables are part of other texts by chance."""
_ROLES = (("trainer",), ("orchestrator",), ("inference",))
_CREDENTIALS = re.compile(r"\w://[^/?#@\s]+@")
"""User and password in a URL."""


def keys_without_effect(config: BaseConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys without effect that differ from their default, with the reason.

    A shared value of `rl` is reported once, with its key at the top of `rl` if it has one.
    """
    root: Path = ()
    found = [(root, config, *given) for given in config.without_effect_alone()]
    for path, block in _blocks(config, root):
        keys = nodes_of(type(block)).items()
        unused = ((name, str(node.marks[NO_EFFECT])) for name, node in keys if NO_EFFECT in node.marks)
        found += [(path, block, *given) for given in (*block.without_effect(), *unused)]
    seen = set[tuple[str, str]]()
    for path, block, key, reason in sorted(found, key=lambda item: item[0][:1] in _ROLES):
        known = (dotted((*(path[1:] if path[:1] in _ROLES else path), key)), reason)
        if known not in seen and not _is_default(block, key):
            seen.add(known)
            yield dotted((*path, key)), reason


def _blocks(block: BaseConfig, path: Path) -> Iterator[tuple[Path, BaseConfig]]:
    yield path, block
    for name, value in block:
        items = [((name, index), item) for index, item in enumerate(value)] if isinstance(value, list) else []
        for end, item in (*items, ((name,), value)):
            if isinstance(item, BaseConfig):
                yield from _blocks(item, (*path, *end))


def _is_default(block: Any, key: str) -> bool:
    """Whether the value at a dotted key is the default of its block."""
    *blocks, last = key.split(".")
    for part in blocks:
        block = getattr(block, part)
        if block is None:
            return True
    default = type(block).model_fields[last].get_default(call_default_factory=True)
    return bool(getattr(block, last) == default)


def refuse_secrets(state: ConfigState) -> None:
    """Reject keys and passwords, because the configuration is written to the run directory."""
    for given, origin in state.origins.items():
        for path, text in _leaves(given, state.get(given)):
            if not isinstance(text, str):
                continue
            if isinstance(path[-1], str) and _SECRET.search(path[-1]) and text:
                raise ConfigError(
                    f"{dotted(path)} ({origin.label}) looks like a secret, and the configuration is written to disk; "
                    "put it into an environment variable and set the name of the variable"
                )
            if _CREDENTIALS.search(text):
                raise ConfigError(
                    f"{dotted(path)} ({origin.label}) contains a URL with a user or password, and the configuration is "
                    "written to disk; a server's key comes from the environment (client.api_key_var)"
                )


def find_secret(data: bytes) -> str | None:
    """Return the name of an environment variable whose value is a secret and part of `data`; None if there is none."""
    long_enough = ((name, value) for name, value in os.environ.items() if len(value) >= _MIN_SECRET_LENGTH)
    return next(
        (name for name, value in long_enough if _SECRET_VARIABLE.search(name) and os.fsencode(value) in data), None
    )


def refuse_bools_as_numbers(state: ConfigState) -> None:
    """Raise ConfigError for `resume_step = true`, which pydantic would convert to 1."""
    for given, origin in state.origins.items():
        for path, value in _leaves(given, state.get(given)):
            key = path if find(state.root, path) else path[:-1]  # an entry of a list
            if isinstance(value, bool) and _is_number(key, state):
                shown = f"{dotted(path)} = {str(value).lower()} ({origin.label})"
                raise ConfigError(f"{shown}: input should be a number{_meaning(key, state)}")


def _is_number(key: Path, state: ConfigState) -> bool:
    """Return whether a key is a number or a list of numbers."""
    found = find(state.root, key)
    return found is not None and found[1].metavar.removesuffix(",...") in ("int", "float")


def _leaves(path: Path, value: object) -> Iterator[tuple[Path, object]]:
    """Yield every scalar in a value with its path."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves((*path, key), inner)
    else:
        yield path, value


def _meaning(path: Path, state: ConfigState) -> str:
    """Return the last part of a key and its description, as the end of a line."""
    add_descriptions(state.root)
    found = find(state.root, path)
    return f"; {path[-1]}: {' '.join(found[1].description.split())}".rstrip(".") if found else ""


def explain(error: ValidationError, state: ConfigState) -> str:
    """Describe the first problem in one line: the key, its value, its source, the problem."""
    first, *_ = errors = error.errors()
    path = _known_part(first["loc"], state)
    if first["type"].startswith("union_tag"):
        path = (*path, "type")
        first["input"] = state.get(path)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        block = resolve(state.root, path[:-1])[1]
        tags = [tag_of(variant) for variant in block.variants if block.is_union and path[-1] in variant.model_fields]
        message = f"needs type = {' or '.join(tags)}" if tags else message
    if first["type"] == "dict_type":
        message = f"{message}; set {dotted(path)}.KEY"
    if first["type"] == "value_error":
        if state.is_on(path) or resolve(state.root, path)[1].kind is Kind.BLOCK:
            where = dotted(path)
        else:
            where = state.describe(path) if state.is_set(path) else f"{dotted(path)} is not set"
        text = f"{where}: {message}" if path else message
    else:
        shown = repr(first["input"]) if not isinstance(first["input"], dict) else "{...}"
        text = f"{dotted(path)} = {shown} ({state.origin(path).label}): {message[:1].lower()}{message[1:]}"
        text += _meaning(path, state) if first["type"].endswith("_parsing") else ""
    # `rl` copies a shared value to its processes, where it is the same problem.
    problems = {(state.origin(_known_part(e["loc"], state)).label, e["loc"][-1:], e["msg"]) for e in errors}
    return " ".join(text.split()) + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


def _known_part(loc: tuple[int | str, ...], state: ConfigState) -> Path:
    """Return pydantic's path without the tags of unions."""
    path: Path = ()
    for position, part in enumerate(loc):
        is_tag = state.get((*path, "type")) == part
        if state.is_set((*path, part)) or (position == len(loc) - 1 and not is_tag):
            path = (*path, part)
    return path
