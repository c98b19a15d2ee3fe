"""The sources of values: TOML files, environment and `.env`. Each becomes a list of assignments.

The environment is read by pydantic-settings, raw; values are read by the same rules wherever they come from.
"""

import ast
import json
import os
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path as FilePath
from typing import Any

from pydantic import create_model
from pydantic_settings import BaseSettings, DotEnvSettingsSource, EnvSettingsSource, SettingsConfigDict

from prime_rl.configs.base import RootConfig
from prime_rl.configs.schema import ONLY, Kind, Node, Path, UnknownKeyError, dotted, is_alias_prefix, resolve
from prime_rl.configs.state import Assignment, Origin, Rank
from prime_rl.errors import ConfigError

ENV_PREFIX = "PRIME_"
SUPERVISED = "PRIME_RL_SUPERVISED"
"""Environment variable that is `1` in the processes that `rl` started: they take their values from `rl` alone."""
_NEVER = ("PRIME_INTELLECT_", "PRIME_API_KEY")


def read_file(root: type[RootConfig], file: str, section: Sequence[str] = ()) -> list[Assignment]:
    """Read a TOML file, as the whole configuration or as the block `section`.

    Raises:
        ConfigError: the file is missing, unreadable, not TOML, or has an unknown key.
    """
    path = FilePath(file)
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"configuration file {file} does not exist (looked in {FilePath.cwd()})") from None
    except OSError as error:
        raise ConfigError(f"configuration file {file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {file} is not TOML: {' '.join(str(error).split())}") from None
    origin = Origin(Rank.FILE, file)
    blocks = [Assignment(resolve(root, section)[0], {}, origin)] if section else []
    return [*blocks, *flatten(root, tuple(section), data, origin)]


def read_environment(root: type[RootConfig]) -> list[Assignment]:
    """Read `PRIME_A__B` from `.env` and, above it, from the process's environment.

    Other programs have PRIME_ variables too, so a name whose first part is no key is not ours. PRIME_INTELLECT_*
    and PRIME_API_KEY never are. Processes that `rl` started read none: it has read them. Weakest are the few variables
    without the prefix (`root.variables`).
    """
    if os.environ.get(SUPERVISED) == "1":
        return []
    settings = _settings_of(root)
    found = [value for name, key in root.variables.items() for value in _from_variable(root, name, key.split("."))]
    for rank, source in (
        (Rank.DOTENV, DotEnvSettingsSource(settings)),
        (Rank.ENVIRONMENT, EnvSettingsSource(settings)),
    ):
        for key, value in source().items():
            if key in root.model_fields and not _variable((key,)).startswith(_NEVER):
                found += _from_environment(root, (key,), value, rank)
    return found


def flatten(root: type[RootConfig], path: Sequence[str | int], value: Any, origin: Origin) -> Iterator[Assignment]:
    """Turn nested values into one assignment per key, checking every key against the schema.

    Raises:
        ConfigError: an unknown key, or a value where a block is expected.
    """
    if path and isinstance(value, dict) and is_alias_prefix(root, path):
        for key, inner in value.items():
            yield from flatten(root, (*path, key), inner, origin)
        return
    try:
        known, node = resolve(root, path)
    except UnknownKeyError as error:
        raise ConfigError(f"unknown key {error} in {origin.label}{error.hint}") from None
    if value == "None":
        value = None
    if node.kind is Kind.BLOCKS:
        yield from _flatten_blocks(root, path, value, origin)
    elif node.kind is Kind.BLOCK:
        yield from _flatten_block(root, path, node, value, origin)
    elif node.kind is Kind.MAPPING and isinstance(value, dict):
        yield Assignment(known, {}, origin)
        for key, inner in value.items():
            yield Assignment((*known, key), _nones(inner), origin)
    else:
        yield Assignment(known, value, origin)


def read_literal(text: str) -> Any:
    """Read a value whose type is free: JSON, Python, or else the text itself."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return text


def read_text(node: Node, text: str) -> Any:
    """Read what was typed for a key: `None`, a dict or list in JSON or Python, or text that pydantic converts."""
    if text == "None":
        return None
    if node.field is None and not node.variants:
        return read_literal(text)
    if node.kind in (Kind.BLOCK, Kind.BLOCKS, Kind.MAPPING) or (node.kind is Kind.LIST and text[:1] == "["):
        return {"true": True, "false": False}.get(text, read_literal(text))
    return text


def _flatten_block(
    root: type[RootConfig], path: Sequence[str | int], node: Node, value: Any, origin: Origin
) -> Iterator[Assignment]:
    known = resolve(root, path)[0]
    if isinstance(value, bool) and node.optional:
        value = {} if value else None
    elif node.shorthand and value is not None and not isinstance(value, dict):
        value = {node.shorthand: value}
    if value is None:
        yield Assignment(known, None, origin)
    elif not isinstance(value, dict):
        raise ConfigError(f"{dotted(known)} = {value!r} ({origin.label}) is a block; set one of its keys")
    else:
        if known:
            yield Assignment(known, {}, origin)
        for key, inner in value.items():
            yield from flatten(root, (*path, key), inner, origin)


def _nones(value: Any) -> Any:
    """TOML has no null: "None" stands for it."""
    if isinstance(value, dict):
        return {key: _nones(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_nones(inner) for inner in value]
    return None if value == "None" else value


def _flatten_blocks(
    root: type[RootConfig], path: Sequence[str | int], value: Any, origin: Origin
) -> Iterator[Assignment]:
    """A list replaces the list before it; a single table is its only entry."""
    known = resolve(root, path)[0]
    if isinstance(value, str):
        value = [item.strip() for item in value.split(",")]
    if isinstance(value, dict):
        yield from flatten(root, (*path, ONLY), value, origin)
    elif isinstance(value, list):
        yield Assignment(known, [], origin)
        for index, item in enumerate(value):
            yield from flatten(root, (*path, index), item, origin)
    else:
        yield Assignment(known, value, origin)


def _settings_of(root: type[RootConfig]) -> type[BaseSettings]:
    """The same keys as a pydantic-settings class, whose sources find the variables that belong to them."""

    class Base(BaseSettings):
        model_config = SettingsConfigDict(
            env_prefix=ENV_PREFIX, env_nested_delimiter="__", env_file=".env", extra="ignore", enable_decoding=False
        )

    fields: dict[str, Any] = {name: (field.annotation, None) for name, field in root.model_fields.items()}
    return create_model("Settings", __base__=Base, **fields)


def _from_environment(root: type[RootConfig], path: Path, value: Any, rank: Rank) -> Iterator[Assignment]:
    origin = Origin(rank, _variable(path) + (" in .env" if rank is Rank.DOTENV else ""))
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _from_environment(root, (*path, key), inner, rank)
        return
    try:
        _, node = resolve(root, path)
    except UnknownKeyError as error:
        raise ConfigError(f"unknown key {error} in {origin.label}{error.hint}") from None
    yield from flatten(root, path, read_text(node, value) if isinstance(value, str) else value, origin)


def _from_variable(root: type[RootConfig], name: str, path: Sequence[str]) -> Iterator[Assignment]:
    if text := os.environ.get(name):
        yield from flatten(root, path, read_text(resolve(root, path)[1], text), Origin(Rank.DOTENV, name))


def _variable(path: Path) -> str:
    return ENV_PREFIX + "__".join(str(part).upper() for part in path)
