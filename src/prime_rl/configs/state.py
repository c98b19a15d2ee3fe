"""The merged values of all sources, each with the place that it came from."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

from prime_rl.configs.base import BaseConfig
from prime_rl.configs.schema import ONLY, Kind, Node, Path, dotted, node_of, resolve, tag_of
from prime_rl.errors import ConfigError


class Rank(IntEnum):
    """Sources, the weakest first."""

    DEFAULT = 0
    DOTENV = 1
    ENVIRONMENT = 2
    FILE = 3
    COMMAND_LINE = 4


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was given.

    Attributes:
        rank: which source.
        label: what the user can look up: `--max-steps`, `t.toml`, `PRIME_MAX_STEPS`.
    """

    rank: Rank
    label: str


DEFAULT: Final = Origin(Rank.DEFAULT, "default")


@dataclass(frozen=True, slots=True)
class Assignment:
    """One value given by one source.

    Attributes:
        path: canonical path of the key.
        value: a scalar, list or dict of values; `{}` for a block switches it on, `[]` empties a list of blocks.
        origin: where it was given.
    """

    path: Path
    value: Any
    origin: Origin


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()


@dataclass
class State:
    """Nested values as the models take them, and the origin of each.

    Attributes:
        root: the model that the values are for.
        values: nested dicts, lists and scalars.
        origins: canonical path -> origin, for every value that was given.
    """

    root: type[BaseConfig]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, Origin] = field(default_factory=dict)

    def apply(self, assignments: Iterable[Assignment]) -> None:
        """Merge a source over what is there; a `type` comes before the keys of its variant."""
        for assignment in sorted(assignments, key=lambda a: a.path[-1:] != ("type",)):
            self.put(assignment.path, assignment.value, assignment.origin)

    def get(self, path: str | Path) -> Any:
        """The value at a path; MISSING if no source gave one."""
        here: Any = self.values
        for part in _parts(path):
            try:
                here = here[part]
            except (KeyError, IndexError, TypeError):
                return MISSING
        return here

    def is_set(self, path: str | Path) -> bool:
        """Whether a source gave a value, None included."""
        return self.get(path) is not MISSING

    def origin(self, path: str | Path) -> Origin:
        """Where the value, or the block around it, was given; the default's origin if nowhere."""
        parts = _parts(path)
        for length in range(len(parts), 0, -1):
            if parts[:length] in self.origins:
                return self.origins[parts[:length]]
        return DEFAULT

    def put(self, path: str | Path, value: Any, origin: Origin) -> None:
        """Set one value, making the blocks around it. An empty dict switches a block on and keeps its keys."""
        *blocks, last = parts = self._settle(_parts(path))
        here: Any = self.values
        for part, following in zip(blocks, parts[1:], strict=False):
            here = _enter(here, part, [] if isinstance(following, int) else {}, parts)
        _, node = resolve(self.root, parts)
        if value == {} and node.kind in (Kind.BLOCK, Kind.MAPPING):
            _enter(here, last, {}, parts)
        else:
            _store(here, last, value, parts)
        if last == "type" and len(parts) > 1:
            self._drop_other_variants(parts[:-1], value)
        self.origins[parts] = origin

    def remove(self, path: str | Path) -> None:
        """Forget a value, so that its default stands."""
        *blocks, last = parts = _parts(path)
        here = self.get(tuple(blocks))
        if isinstance(here, dict):
            here.pop(last, None)
        self.origins = {known: origin for known, origin in self.origins.items() if known[: len(parts)] != parts}

    def describe(self, path: str | Path) -> str:
        """`trainer.async_level = 1 (t.toml)`."""
        return f"{dotted(_parts(path))} = {self.get(path)} ({self.origin(path).label})"

    def _settle(self, parts: Path) -> Path:
        """Replace `ONLY` by the index of the only entry. Raises ConfigError if the list has several."""
        for position, part in enumerate(parts):
            if part == ONLY:
                entries = self.get(parts[:position])
                if isinstance(entries, list) and len(entries) > 1:
                    block, key = dotted(parts[:position]), dotted(parts[position:])
                    raise ConfigError(f"{block} has {len(entries)} entries; say which one, such as {block}.0.{key}")
                parts = (*parts[:position], 0, *parts[position + 1 :])
        return parts

    def _drop_other_variants(self, block: Path, tag: Any) -> None:
        """A new `type` over a weaker source leaves only the keys that the new variant knows."""
        _, node = resolve(self.root, block)
        known = next((variant.model_fields for variant in node.variants if tag_of(variant) == tag), None)
        if node.is_union and known is not None:
            values = self.get(block)
            for key in [key for key in values if key not in known]:
                self.remove((*block, key))


def fill_defaults(model: type[BaseConfig], values: dict[str, Any]) -> None:
    """Complete blocks that are given in part: the tag of a union, and what the field's default has set.

    So `--optim.lr 1` stays on the default optimizer, and keeps whatever else that default sets.
    """
    for name, info in model.model_fields.items():
        given, node = values.get(name), node_of(info)
        if node.kind is Kind.BLOCKS and isinstance(given, list):
            for item in given:
                if isinstance(item, dict):
                    fill_defaults(node.variants[0], item)
        if node.kind is not Kind.BLOCK or not isinstance(given, dict):
            continue
        variant = _variant(node, given)
        default = info.get_default(call_default_factory=True)
        if isinstance(default, BaseConfig) and type(default) is variant:
            values[name] = given = _under(given, default.model_dump(exclude_unset=True))
        if node.is_union:
            given.setdefault("type", tag_of(variant))
        fill_defaults(variant, given)


def _variant(node: Node, given: dict[str, Any]) -> type[BaseConfig]:
    tags = {tag_of(variant): variant for variant in node.variants} if node.is_union else {}
    return tags.get(str(given.get("type")), node.variants[0])


def _under(given: dict[str, Any], below: dict[str, Any]) -> dict[str, Any]:
    merged = {**below, **given}
    for key, value in below.items():
        if isinstance(value, dict) and isinstance(given.get(key), dict):
            merged[key] = _under(given[key], value)
    return merged


def _parts(path: str | Path) -> Path:
    return tuple(path.split(".")) if isinstance(path, str) else path


def _enter(here: Any, part: str | int, empty: dict[str, Any] | list[Any], path: Sequence[str | int]) -> Any:
    """Go into a block, making it where it is missing, switched off or a plain value."""
    inside = _peek(here, part)
    if not isinstance(inside, type(empty)):
        inside = empty
        _store(here, part, inside, path)
    return inside


def _peek(here: Any, part: str | int) -> Any:
    if isinstance(here, list):
        return here[int(part)] if int(part) < len(here) else None
    return here.get(part)


def _store(here: Any, part: str | int, value: Any, path: Sequence[str | int]) -> None:
    if not isinstance(here, list):
        here[part] = value
        return
    index = int(part)
    if index > len(here):
        raise ConfigError(f"{dotted(path)}: the list has {len(here)} entries, so index {index} would leave a gap")
    here[index:] = [value, *here[index + 1 :]]
