"""Loading: command line over files over environment over defaults, merged before anything is constructed."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from prime_rl.configs.base import NO_EFFECT_YET, RootConfig
from prime_rl.configs.cli import parse
from prime_rl.configs.dump import write_config
from prime_rl.configs.help import format_help
from prime_rl.configs.schema import Path, dotted, resolve, tag_of
from prime_rl.configs.sources import read_environment
from prime_rl.configs.state import MISSING, State, fill_defaults
from prime_rl.errors import ConfigError

Config = TypeVar("Config", bound=RootConfig)

_SECRET = re.compile(
    r"(^|_)(api_?key|access_?key|access_token|auth_token|hf_token|secret|password|authorization)$", re.I
)
_CREDENTIALS = re.compile(r"\w://[^/?#@\s]+@")
"""User and password in a URL."""


def load_config(root: type[Config], argv: Sequence[str]) -> Config:
    """Read a configuration, and do what `--help` and `--dry-run` ask for.

    Raises:
        ConfigError: bad input, as one line.
        SystemExit: 0, after `--help` or `--dry-run`.
    """
    line = parse(root, argv)
    if line.help:
        print(format_help(root))
        sys.exit(0)
    state = State(root)
    state.apply(read_environment(root))
    for file in line.files:
        state.apply(file)
    state.apply(line.flags)
    config = build(root, state)
    for key, reason in keys_without_effect(config):
        print(f"warning: {key} {reason}", file=sys.stderr)
    if line.dry_run:
        path = config.dry_run_path()
        write_config(config, path)
        print(f"wrote the resolved configuration to {path}; nothing was started")
        sys.exit(0)
    return config


def build(root: type[Config], state: State) -> Config:
    """Construct the models from merged values.

    Raises:
        ConfigError: a wrong type, values that contradict each other, a secret ...; names the place.
    """
    _refuse_secrets(state)
    root.prepare(state)
    fill_defaults(root, state.values)
    try:
        return root.model_validate(state.values)
    except ValidationError as error:
        raise ConfigError(_explain(error, state)) from None


def keys_without_effect(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys that nothing reads yet and that are set to something else than their default, and why."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        extra = field.json_schema_extra
        if isinstance(extra, dict) and NO_EFFECT_YET in extra:
            if value != field.get_default(call_default_factory=True):
                yield prefix + name, str(extra[NO_EFFECT_YET])
        elif isinstance(value, BaseModel):
            yield from keys_without_effect(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from keys_without_effect(item, f"{prefix}{name}.{index}.")


def _refuse_secrets(state: State) -> None:
    """The configuration is written to the run directory, so a key in it would be too."""
    for given, origin in state.origins.items():
        for path, text in _texts(given, state.get(given)):
            if isinstance(path[-1], str) and _SECRET.search(path[-1]) and text:
                raise ConfigError(
                    f"{dotted(path)} ({origin.label}) looks like a secret, and the configuration is written to disk; "
                    "put it into an environment variable and give that variable's name"
                )
            if _CREDENTIALS.search(text):
                raise ConfigError(
                    f"{dotted(path)} ({origin.label}) holds a URL with a user or password, and the configuration is "
                    "written to disk; a server's key comes from the environment (client.api_key_var)"
                )


def _texts(path: Path, value: object) -> Iterator[tuple[Path, str]]:
    """Every text in a value, and where it is."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping | list):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _texts((*path, key), inner)


def _explain(error: ValidationError, state: State) -> str:
    """The first problem in one line: the key, its value, where it was given, what is wrong."""
    first, *others = error.errors()
    path = _known_part(first["loc"], state)
    if first["type"].startswith("union_tag"):
        path = (*path, "type")
        first["input"] = state.get(path)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden" and (tags := _types_with(path, state)):
        message = f"needs type = {' or '.join(tags)}"
    value = state.get(path) if path else MISSING
    if first["type"] == "value_error" and not path:
        text = message
    elif first["type"] == "value_error":
        text = f"{dotted(path)}: {message}" if isinstance(value, dict) else f"{state.describe(path)}: {message}"
    else:
        shown = repr(first["input"]) if not isinstance(first["input"], dict) else "{...}"
        text = f"{dotted(path)} = {shown} ({state.origin(path).label}): {message[:1].lower()}{message[1:]}"
    more = f" (and {len(others)} more)" if others else ""
    return " ".join(text.split()) + more


def _known_part(loc: tuple[int | str, ...], state: State) -> Path:
    """pydantic puts the tag of a union into the path; leave out what is no key."""
    path: Path = ()
    for position, part in enumerate(loc):
        is_tag = state.get((*path, "type")) == part
        if state.is_set((*path, part)) or (position == len(loc) - 1 and not is_tag):
            path = (*path, part)
    return path


def _types_with(path: Path, state: State) -> list[str]:
    """Return the variants of a union, by their `type`, that have the key `path`, where the chosen one has not."""
    _, block = resolve(state.root, path[:-1])
    return [tag_of(variant) for variant in block.variants if block.is_union and path[-1] in variant.model_fields]
