"""The merged values of all sources, with the origin of each value."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

from prime_rl.core.errors import ConfigError
from prime_rl.loading.base_config import BaseConfig
from prime_rl.loading.schema import ONLY, Kind, Path, default_of, dotted, nodes_of, resolve, tag_of


class Rank(IntEnum):
    """Sources, weakest first."""

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


MISSING: Final = object()
"""Returned for a value that no source gave."""


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
        # `type` first: it removes the keys of other variants.
        for assignment in sorted(assignments, key=lambda a: a.path[-1:] != ("type",)):
            self.put(assignment.path, assignment.value, assignment.origin)

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
        """Set a value that no source gave."""
        if not self.is_set(path):
            self.put(path, value, origin)

    def remove(self, path: str | Path) -> None:
        """Remove a value, so that its default is used."""
        *blocks, last = parts = _parts(path)
        if isinstance(here := self.get(tuple(blocks)), dict):
            here.pop(last, None)
        self.origins = {known: origin for known, origin in self.origins.items() if known[: len(parts)] != parts}

    def describe(self, path: str | Path) -> str:
        """`trainer.async_level = 1 (t.toml)`."""
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
