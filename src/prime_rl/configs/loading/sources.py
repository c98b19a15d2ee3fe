"""The sources of values: command line, TOML files, environment and `.env`. Each becomes a list of assignments.

Flags are parsed with the schema instead of argparse (docs/design/configuration_library.md): a switch can be a whole
block (`--ckpt`, `--no-ckpt`), a file can follow any block, and an unknown flag is reported with the closest known one.
"""

import ast
import difflib
import json
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from prime_rl.configs.loading.base_config import BaseConfig, substitute
from prime_rl.configs.loading.provenance import Assignment, ConfigState, Origin, Rank
from prime_rl.configs.loading.schema import (
    FREE,
    ONLY,
    Kind,
    Node,
    dotted,
    find,
    flag,
    hint,
    is_alias_prefix,
    replace_deprecated,
    resolve,
    walk,
)
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.liveness.parent_process import SUPERVISED

ENV_PREFIX = "PRIME_"
DOTENV = ".env"
_NEVER = ("PRIME_INTELLECT_", "PRIME_API_KEY")
_WORDS = {"true": True, "false": False, "1": True, "0": False, "none": None}


class CommandLine:
    """The command line: `@ file.toml`, `--trainer @ file.toml`, `--key value`, `--flag`, `--no-flag`, `--block`.

    Raises ConfigError for bad input.

    Attributes:
        files: the assignments of each TOML file, in order.
        flags: the assignments of the flags.
        actions: which of `--help`, `--help-all` and `--dry-run` were given.
    """

    def __init__(self, root: type[BaseConfig], argv: Sequence[str]) -> None:
        self.files: list[list[Assignment]] = []
        self.flags: list[Assignment] = []
        self.actions = set[str]()
        self._root, self._rest = root, list(argv)
        while self._rest:
            if self._rest[0].startswith("@"):
                self._read_files(())
                continue
            token = self._rest.pop(0)
            if (action := token.replace("_", "-")) in ("--help", "-h", "--help-all", "--dry-run"):
                self.actions.add("--help" if action == "-h" else action)
            elif token.startswith("--") and len(token) > 2:
                self._read_flag(token)
            else:
                raise ConfigError(f'unexpected argument "{token}"; keys are given as --key value, files as @ file.toml')

    def _read_files(self, section: Sequence[str]) -> None:
        """Parse consecutive `@ file.toml`."""
        while self._rest and self._rest[0].startswith("@"):
            token = self._rest.pop(0)
            file = token[1:]
            if not file:
                if not self._rest or self._rest[0].startswith("--"):
                    raise ConfigError("@ is not followed by a configuration file")
                file = self._rest.pop(0)
            self.files.append(read_file(self._root, file, section))

    def _read_flag(self, token: str) -> None:
        name, equals, text = token.partition("=")
        parts, node, negated = self._find(name)
        if not equals and not negated and self._rest and self._rest[0].startswith("@"):
            if node.kind is not Kind.BLOCK:
                raise ConfigError(f"{name} is not a block of keys; a file can only follow a block")
            self._read_files(parts)
            return
        if negated and equals:
            raise ConfigError(f"{name} takes no value")
        if negated:
            value: object = False if node.kind is Kind.FLAG else None
        else:
            value = read_text(node, text) if equals else self._read_value(name, node)
        if isinstance(value, str) and node.kind is Kind.FLAG:
            value = _WORDS.get(value.lower(), value)
        given = flatten(self._root, parts, value, Origin(Rank.COMMAND_LINE, name))
        self.flags += [replace(assignment, negates=negated) for assignment in given]

    def _find(self, name: str) -> tuple[list[str], Node, bool]:
        """Return the parts of a flag, its node, and whether it starts with `--no-`."""
        parts, bare = name[2:].split("."), name[5:].split(".")
        if not all(parts):
            raise ConfigError(f"{name} is not a key; keys look like --trainer.optim.lr")
        if found := find(self._root, parts):
            return parts, found[1], False
        if name.startswith(("--no-", "--no_")) and all(bare) and (found := find(self._root, bare)):
            if (found[1].kind is not Kind.FLAG and not found[1].optional) or found[1] is FREE:
                raise ConfigError(f"{name}: {flag(bare)} is neither a switch nor optional; set a value instead")
            return bare, found[1], True
        if name in ("--config", "--config-file", "--help", "--help-all", "--dry-run"):
            raise ConfigError(f"{name} takes no value here; files are given as @ FILE.toml")
        advice = hint(self._root, parts).replace("did you mean ", "did you mean --").replace("_", "-")
        raise ConfigError(f"unknown key {name}{advice or f'; see `{self._root.command_name} --help`'}")

    def _read_value(self, name: str, node: Node) -> object:
        """Parse the value after a flag; a switch and an optional block need none."""
        following = self._rest[0] if self._rest and not self._rest[0].startswith("--") else None
        is_word = following is not None and following.lower() in _WORDS
        if node.kind is Kind.FLAG and following is not None and (is_word or following.isdecimal()):
            return read_text(node, self._rest.pop(0))
        if node.kind is Kind.FLAG:
            return True
        if node.kind is Kind.BLOCK:
            if following is None and node.optional:
                return {}
            if following is None:
                raise ConfigError(f"{name} is a block of keys: follow it with @ file.toml, or set {name}.KEY")
            if not (is_word or following[:1] == "{" or node.variants[0].shorthand):
                advice = f"set {name}.KEY, or follow it with @ file.toml"
                raise ConfigError(f'{name} is a block of keys and cannot be "{following}"; {advice}')
        if following is None:
            raise ConfigError(f"{name} needs a value ({node.metavar})")
        text = self._rest.pop(0)
        if node.kind is Kind.LIST and text[:1] not in "[{":
            while self._rest and not self._rest[0].startswith(("--", "@")):
                text += "," + self._rest.pop(0)
        return read_text(node, text)


def read_file(root: type[BaseConfig], file: str, section: Sequence[str] = ()) -> list[Assignment]:
    """Read a TOML file, as the whole configuration or as the block `section`. Raises ConfigError if it is not valid."""
    if not Path(file).exists():
        folder = Path(file).parent
        names = [path.name for path in folder.glob("*.toml") if path.exists()] if folder.is_dir() else []
        similar = difflib.get_close_matches(Path(file).name, names, n=1)
        advice = f"; did you mean {folder / similar[0]}?" if similar else f" (looked in {Path.cwd()})"
        raise ConfigError(f"configuration file {file} does not exist{advice}")
    try:
        data = tomllib.loads(Path(file).read_text(encoding="utf-8-sig"))  # editors may write a byte order mark
    except (OSError, ValueError, RecursionError) as error:
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
            elif _is_configuration(name) and (meant := _misspelt(root, path)):
                warn(f"{name} is no key and is ignored; did you mean {ENV_PREFIX}{meant}?")
    return found


def _misspelt(root: type[BaseConfig], path: Sequence[str]) -> str | None:
    """Return the variable, without its prefix, of a key whose name is almost this one, or has single underscores."""
    keys = {dotted(key).replace(".", "_"): "__".join(map(str, key)).upper() for key, _ in walk((root,))}
    return next((keys[name] for name in difflib.get_close_matches("_".join(path), keys, 1, cutoff=0.9)), None)


def warn(text: str) -> None:
    """Print a warning once per run: only `rl` and rank 0 print."""
    if os.environ.get(SUPERVISED) != "1" and os.environ.get("RANK", "0") == "0":
        print(f"warning: {text}", file=sys.stderr)


def _from_variable(root: type[BaseConfig], path: Sequence[str], text: str, origin: Origin) -> Iterator[Assignment]:
    yield from flatten(root, path, read_text(resolve(root, path, origin.label)[1], text), origin)


def _export_dotenv() -> dict[str, str]:
    """Add the variables of other programs in `.env` to the environment, without replacing any, and return all.

    Values are never printed or written, also not in the ConfigError for a file that cannot be read.
    """
    from dotenv import dotenv_values  # not needed by `--help`

    file = Path.cwd() / DOTENV
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
        # With an id or a type it is another one then, with none of its earlier keys.
        if {node.variants[0].shorthand, "type"} & value.keys():
            yield Assignment(known, [], origin)
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
        if node.metavar == "path" and isinstance(current, str) and current.startswith("~"):
            problem = f"{dotted(known)} = {current} ({origin.label})"
            with translate_error(RuntimeError, lambda error: ConfigError(f"{problem}: {error}; write the whole path")):
                current = str(Path(current).expanduser())
        warning = f"{dotted(path)} ({origin.label}) is deprecated; {advice}" if advice else ""
        yield Assignment(known, current, origin, warning=warning)


def read_text(node: Node, text: str) -> Any:
    """Parse the text of a value: JSON, Python or TOML for keys of any type, blocks and lists, else text for pydantic.

    Raises:
        ConfigError: a block, or a list of blocks, starts with a bracket and is none of these.
    """
    if text == "None":
        return None
    is_list = node.kind is Kind.LIST and text[:1] == "["
    if node.field is not None and not is_list and node.kind in (Kind.LIST, Kind.FLAG, Kind.VALUE):
        return text
    for read in (json.loads, ast.literal_eval, lambda toml: tomllib.loads(f"value = {toml}")["value"]):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):  # then it is of another form
            return read(text)
    if text.lstrip()[:1] in ("{", "[") and node.kind in (Kind.BLOCK, Kind.BLOCKS, Kind.MAPPING):
        example = '[{id = "NAME", args = {KEY = "TEXT"}}]' if node.kind is Kind.BLOCKS else '{KEY = "TEXT"}'
        raise ConfigError(f"{text} is neither TOML, JSON nor Python; write it like '{example}', or use a TOML file")
    return text
