"""The sources of values: TOML files, environment and `.env`. Each becomes a list of assignments."""

import ast
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path as FilePath
from typing import Any

from prime_rl.core.errors import ConfigError
from prime_rl.liveness.parent_process import SUPERVISED
from prime_rl.loading.base_config import BaseConfig
from prime_rl.loading.dump import substitute
from prime_rl.loading.provenance import Assignment, ConfigState, Origin, Rank
from prime_rl.loading.schema import ONLY, Kind, Node, dotted, is_alias_prefix, replace_deprecated, resolve

ENV_PREFIX = "PRIME_"
DOTENV = ".env"
_NEVER = ("PRIME_INTELLECT_", "PRIME_API_KEY")


def read_file(root: type[BaseConfig], file: str, section: Sequence[str] = ()) -> list[Assignment]:
    """Read a TOML file, as the whole configuration or as the block `section`. Raises ConfigError if it is not valid."""
    if not FilePath(file).exists():
        raise ConfigError(f"configuration file {file} does not exist (looked in {FilePath.cwd()})")
    try:
        data = tomllib.loads(FilePath(file).read_text())
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"is not TOML: {error}"
        raise ConfigError(f"configuration file {file} {' '.join(reason.split())}") from None
    origin = Origin(Rank.FILE, file)
    blocks = [Assignment(resolve(root, section)[0], {}, origin)] if section else []
    return [*blocks, *flatten(root, tuple(section), data, origin)]


def read_values(root: type[BaseConfig], values: Mapping[str, object]) -> list[Assignment]:
    """Read the values of a Python program; raise ConfigError for an unknown key."""
    origin = Origin(Rank.COMMAND_LINE, "given in Python")
    return [one for key, value in values.items() for one in flatten(root, key.split("."), value, origin)]


def read_environment(root: type[BaseConfig]) -> list[Assignment]:
    """Read `root.variables`, then `PRIME_A__B` from `.env` and from the environment.

    Other variables in `.env`, such as WANDB_API_KEY, are added to the environment. Variables whose first part is not a
    key are ignored, because other programs use the prefix too. Processes that `rl` started read none: their resolved
    files contain the values.
    """
    if os.environ.get(SUPERVISED) == "1":
        return []
    found, dotenv = list[Assignment](), _export_dotenv()
    for name, key in root.variables.items():
        if text := os.environ.get(name):
            found += _from_variable(root, key.split("."), text, Origin(Rank.DOTENV, name))
    for rank, variables in ((Rank.DOTENV, dotenv), (Rank.ENVIRONMENT, os.environ)):
        # The shortest first: PRIME_A__B overrides a key of PRIME_A.
        for name, value in sorted(variables.items(), key=lambda item: item[0].count("__")):
            path = tuple(name.lower().removeprefix(ENV_PREFIX.lower()).split("__"))
            if _is_configuration(name) and path[0] in {*root.model_fields, *root.deprecated}:
                label = ENV_PREFIX + "__".join(path).upper() + (" in .env" if rank is Rank.DOTENV else "")
                found += _from_variable(root, path, value, Origin(rank, label))
    return found


def _from_variable(root: type[BaseConfig], path: Sequence[str], text: str, origin: Origin) -> Iterator[Assignment]:
    yield from flatten(root, path, read_text(resolve(root, path, origin.label)[1], text), origin)


def _export_dotenv() -> dict[str, str]:
    """Add the variables of other programs in `.env` to the environment, without replacing any, and return all.

    Values are never printed or written, also not in the ConfigError for a file that cannot be read.
    """
    from dotenv import dotenv_values  # not needed by `--help`

    file = FilePath.cwd() / DOTENV
    try:
        found = {name: value for name, value in dotenv_values(DOTENV).items() if value is not None}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read {file}: {reason}") from None
    for name, value in found.items():
        if "\0" in name + value:
            raise ConfigError(f"cannot read {file}: it contains a null character")
        if not _is_configuration(name):
            os.environ.setdefault(name, value)
    return found


def take_wandb_variables(state: ConfigState) -> None:
    """Use W&B's variables WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE for keys that no source sets.

    They never switch W&B on.
    """
    if os.environ.get(SUPERVISED) == "1":
        return
    given = {key: (f"WANDB_{key.upper()}", os.environ.get(f"WANDB_{key.upper()}")) for key in ("project", "entity")}
    given["offline"] = ("WANDB_MODE", "true" if os.environ.get("WANDB_MODE") in ("offline", "dryrun") else None)
    for block in filter(state.is_on, ("wandb", "trainer.wandb", "orchestrator.wandb")):
        for key, (name, value) in given.items():
            if value:
                state.fill(f"{block}.{key}", value, Origin(Rank.DOTENV, name))


def _is_configuration(name: str) -> bool:
    return name.upper().startswith(ENV_PREFIX) and not name.upper().startswith(_NEVER)


def flatten(root: type[BaseConfig], path: Sequence[str | int], value: Any, origin: Origin) -> Iterator[Assignment]:
    """Convert nested values into one assignment per key, and check every key against the schema.

    Raises:
        ConfigError: an unknown key, or a value where a block is expected.
    """
    if path and isinstance(value, dict) and is_alias_prefix(root, path):
        for key, inner in value.items():
            yield from flatten(root, (*path, key), inner, origin)
        return
    known, node = resolve(root, path, origin.label)
    value = None if value == "None" else value
    if node.kind is Kind.BLOCKS and isinstance(value, dict):  # a single table sets the only entry
        yield from flatten(root, (*path, ONLY), value, origin)
    elif node.kind is Kind.BLOCKS and isinstance(value, str | list):  # a list replaces the earlier list
        yield Assignment(known, [], origin)
        for index, item in enumerate(value if isinstance(value, list) else value.split(",")):
            yield from flatten(root, (*path, index), item.strip() if isinstance(item, str) else item, origin)
    elif node.kind is Kind.BLOCK:
        if isinstance(value, bool) and node.optional:
            value = {} if value else None
        elif (shorthand := node.variants[0].shorthand) and value is not None and not isinstance(value, dict):
            value = {shorthand: value}
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{dotted(known)} = {value!r} ({origin.label}) is a block of keys; set one of its keys")
        if known:
            yield Assignment(known, None if value is None else {}, origin)
        for key, inner in (value or {}).items():
            yield from flatten(root, (*path, key), inner, origin)
    elif node.kind is Kind.MAPPING and isinstance(value, dict):
        yield Assignment(known, {}, origin)
        for key, inner in value.items():
            yield Assignment((*known, key), substitute(inner, "None", None), origin)
    else:
        current, advice = replace_deprecated(root, path, value)
        warning = f"{dotted(path)} ({origin.label}) is deprecated; {advice}" if advice else ""
        yield Assignment(known, current, origin, warning=warning)


def read_text(node: Node, text: str) -> Any:
    """Parse the text of a value: JSON or Python for keys of any type, blocks and lists, else text for pydantic."""
    if text == "None":
        return None
    is_list = node.kind is Kind.LIST and text[:1] == "["
    if node.field is not None and not is_list and node.kind in (Kind.LIST, Kind.FLAG, Kind.VALUE):
        return text
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):  # then it is of another form
            return read(text)
    return text
