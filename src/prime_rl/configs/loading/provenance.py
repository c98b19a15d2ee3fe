"""The merged values of all sources, with the origin of each value, and what is wrong with them.

That is keys without effect, secrets, and validation errors, each explained in one line.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

from pydantic import ValidationError

from prime_rl.configs.loading.base_config import NO_EFFECT, BaseConfig
from prime_rl.configs.loading.schema import (
    ONLY,
    Kind,
    Path,
    add_descriptions,
    default_of,
    dotted,
    find,
    nodes_of,
    resolve,
    tag_of,
)
from prime_rl.core.errors import ConfigError

MISSING: Final = object()
"""Returned for a value that no source gave."""
_SECRET = re.compile(
    r"(^|_)(api_?key|access_?key|access_token|auth_token|hf_token|secret|password|authorization)$", re.I
)
_HIDDEN = re.compile(r"(^|_)(key|token)$", re.I)
"""Further keys whose text is not shown."""
_SECRET_VARIABLE = re.compile(r"(^|_)(key|token|secret|password)(_|$)", re.I)
_MIN_SECRET_LENGTH = 8
"""Shorter values of such variables are part of other texts by chance."""
_ROLES = (("trainer",), ("orchestrator",), ("inference",))
_CREDENTIALS = re.compile(r"\w://[^/?#@\s]+@")
"""User and password in a URL."""


class Rank(IntEnum):
    """Kinds of sources, from weakest to strongest."""

    DEFAULT = 0
    DOTENV = 1
    ENVIRONMENT = 2
    FILE = 3
    COMMAND_LINE = 4


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a value: its strength, and its name in messages (`--max-steps`, `t.toml`, `PRIME_MAX_STEPS`)."""

    rank: Rank
    label: str


DEFAULT: Final = Origin(Rank.DEFAULT, "default")


@dataclass(frozen=True, slots=True)
class Assignment:
    """One value of one source.

    Attributes:
        path: canonical path of the key.
        value: a scalar, list or dict; `{}` switches a block on, `[]` empties a list of blocks.
        origin: its source.
        negates: it was given as `--no-key`, which does not switch on the blocks around the key.
        warning: warning about a deprecated key or value, or empty.
    """

    path: Path
    value: Any
    origin: Origin
    negates: bool = False
    warning: str = ""


@dataclass
class ConfigState:
    """The merged values and their origins.

    Attributes:
        root: the model of the values.
        values: nested dicts; a list of blocks is a dict by index.
        origins: canonical path -> origin of every value that a source gave.
    """

    root: type[BaseConfig]
    values: dict[Any, Any] = field(default_factory=dict)
    origins: dict[Path, Origin] = field(default_factory=dict)

    def apply(self, assignments: Iterable[Assignment]) -> None:
        """Merge a source over the current values."""
        for assignment in sorted(assignments, key=lambda a: not self._selects(a.path)):
            self.put(assignment.path, assignment.value, assignment.origin)

    def _selects(self, path: Path) -> bool:
        """Return whether a key is the `type` of a union. These are first: they remove the keys of other variants."""
        return path[-1:] == ("type",) and resolve(self.root, path[:-1])[1].is_union

    def hold_back(self, assignments: Sequence[Assignment]) -> tuple[list[Assignment], list[Assignment]]:
        """Split a source into assignments to apply now, and `--no-a.b` for blocks `a` that are still off.

        A shared value of `rl` may still switch the block on; otherwise the negation has no effect.
        """
        on = {self._switch(a.path, itself=a.value is not None) for a in assignments if not a.negates}
        held = [a for a in assignments if a.negates and not self.reaches(a.path) and self._switch(a.path) not in on]
        return [a for a in assignments if a not in held], held

    def reaches(self, path: Path) -> bool:
        """Whether the outermost optional block around a key, if any, is on."""
        return self.is_on(self._switch(path))

    def _switch(self, path: Path, itself: bool = False) -> Path:
        """Return the outermost optional block around a key (or the block `path` itself); empty if there is none."""
        blocks = (path[:length] for length in range(1, len(path) + itself))
        return next((block for block in blocks if resolve(self.root, block)[1].optional), ())

    def get(self, path: str | Path, default: Any = MISSING) -> Any:
        """Return the value at a path, or `default` if no source gave one."""
        here: Any = self.values
        for part in _parts(path):
            here = here.get(part, MISSING) if isinstance(here, dict) else MISSING
        return default if here is MISSING else here

    def is_set(self, path: str | Path) -> bool:
        """Whether a source gave a value, None included."""
        return self.get(path) is not MISSING

    def is_on(self, block: str | Path) -> bool:
        """Whether a source switched a block on, or set one of its keys."""
        return isinstance(self.get(block), dict)

    def origin(self, path: str | Path) -> Origin:
        """Return the origin of a value or of the block around it; DEFAULT if no source gave it."""
        parts = _parts(path)
        known = (self.origins.get(parts[:length]) for length in range(len(parts), 0, -1))
        return next((origin for origin in known if origin), DEFAULT)

    def put(self, path: str | Path, value: Any, origin: Origin) -> None:
        """Set a value and create the blocks around it. An empty dict switches a block on and keeps its keys."""
        *blocks, last = parts = self._resolve_only(_parts(path))
        here = self.values
        for part in blocks:
            here = _enter(here, part, parts)
        kind = resolve(self.root, parts)[1].kind
        if value == {} and kind in (Kind.BLOCK, Kind.MAPPING):
            _enter(here, last, parts)
        else:
            here[last] = {} if value == [] and kind is Kind.BLOCKS else deepcopy(value)
        variants = resolve(self.root, blocks)[1].variants if last == "type" else ()
        for known in (variant.model_fields for variant in variants if len(variants) > 1 and tag_of(variant) == value):
            for key in here.keys() - known.keys():
                self.remove((*blocks, key))  # it belongs to another variant
        self.origins[parts] = origin

    def fill(self, path: str | Path, value: Any, origin: Origin) -> None:
        """Set a value unless a source has set it."""
        if not self.is_set(path):
            self.put(path, value, origin)

    def remove(self, path: str | Path) -> None:
        """Remove a value, so that its default is used."""
        *blocks, last = parts = _parts(path)
        if isinstance(here := self.get(tuple(blocks)), dict):
            here.pop(last, None)
        self.origins = {known: origin for known, origin in self.origins.items() if known[: len(parts)] != parts}

    def describe(self, path: str | Path) -> str:
        """Return key, value and source as text: `trainer.async_level = 1 (t.toml)`."""
        return f"{dotted(_parts(path))} = {self.get(path)} ({self.origin(path).label})"

    def _resolve_only(self, parts: Path) -> Path:
        """Replace `ONLY` by index 0. Raises ConfigError if the list has several entries."""
        for position, part in enumerate(parts):
            if part == ONLY:
                entries = self.get(parts[:position])
                if isinstance(entries, dict) and len(entries) > 1:
                    block, key = dotted(parts[:position]), dotted(parts[position:])
                    raise ConfigError(f"{block} has {len(entries)} entries; give an index, such as {block}.0.{key}")
                parts = (*parts[:position], 0, *parts[position + 1 :])
        return parts


def complete(model: type[BaseConfig], values: dict[Any, Any]) -> dict[str, Any]:
    """Return the values as `model` expects them: with lists, and with defaults for blocks that are partly given.

    A union gets its `type`, and a block the keys of the field's default (`--optim.lr 1` keeps the default optimizer).
    These are added to `values` too.
    """
    done = dict(values)
    for name, node in nodes_of(model).items():
        given = values.get(name)
        if not isinstance(given, dict) or not node.variants:
            continue
        if node.kind is Kind.BLOCKS:
            items = given.values()
            done[name] = [complete(node.variants[0], item) if isinstance(item, dict) else item for item in items]
            continue
        tags = {tag_of(variant): variant for variant in node.variants} if node.is_union else {}
        variant = tags.get(str(given.get("type")), node.variants[0])
        default = default_of(model.model_fields[name])
        if isinstance(default, BaseConfig) and type(default) is variant:
            values[name] = given = {**default.model_dump(exclude_unset=True), **given}
        if node.is_union:
            given.setdefault("type", tag_of(variant))
        done[name] = complete(variant, given)
    return done


def _parts(path: str | Path) -> Path:
    return tuple(path.split(".")) if isinstance(path, str) else path


def _enter(here: dict[Any, Any], part: str | int, path: Path) -> dict[Any, Any]:
    """Return a nested block; create it if it is missing, off or a scalar."""
    if isinstance(part, int) and part > len(here):
        raise ConfigError(f"{dotted(path)}: the list has {len(here)} entries, so index {part} would leave a gap")
    inside: Any = here.get(part)
    if not isinstance(inside, dict):
        inside = here[part] = {}
    return inside


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


def hide_secrets(values: Any, key: str = "") -> Any:
    """Return values from a file, the one of `key` or nested ones, with `(hidden)` for what may be a secret."""
    if isinstance(values, Mapping):
        return {name: hide_secrets(value, name) for name, value in values.items()}
    if isinstance(values, list):
        return [hide_secrets(value, key) for value in values]
    name = key.replace("-", "_")
    is_secret = _SECRET.search(name) or _HIDDEN.search(name) or _CREDENTIALS.search(str(values))
    return "(hidden)" if isinstance(values, str) and is_secret else values


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


def refuse_unusable_values(config: BaseConfig, state: ConfigState) -> None:
    """Raise ConfigError for a whole number of more than 64 bits, and for a text with a null character.

    Files and random generators cannot hold the first, and no path the second.
    """
    for path, block in _blocks(config, ()):
        for key, value in block:
            if isinstance(value, str | os.PathLike) and "\0" in str(value):
                raise ConfigError(f"{dotted((*path, key))} ({state.origin((*path, key)).label}) has a null character")
            if isinstance(value, int) and abs(value) >= 2**63:
                raise ConfigError(f"{dotted((*path, key))} = {value} ({state.origin((*path, key)).label}) is too large")


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
    text = " ".join(found[1].description.split()) if found else ""
    return f"; {path[-1]}: {text}".rstrip(".") if text else ""


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
    problems = dict[object, str]()
    for e in errors:
        known = _known_part(e["loc"], state)
        problems.setdefault((state.origin(known).label, e["loc"][-1:], e["msg"]), dotted(known))
    others = [*problems.values()][1:]
    return " ".join(text.split()) + (f" (also wrong: {', '.join(others)})" if others else "")


def _known_part(loc: tuple[int | str, ...], state: ConfigState) -> Path:
    """Return pydantic's path without the tags of unions."""
    path: Path = ()
    for position, part in enumerate(loc):
        is_tag = state.get((*path, "type")) == part
        if state.is_set((*path, part)) or (position == len(loc) - 1 and not is_tag):
            path = (*path, part)
    return path
