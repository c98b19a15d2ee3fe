"""The keys of the models, and the resolution of a given path such as `--trainer.optim.lr`."""

import ast
import difflib
import inspect
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic.fields import FieldInfo

from prime_rl.core.errors import ConfigError
from prime_rl.loading.base_config import NO_EFFECT, BaseConfig

Path = tuple[str | int, ...]
_SYNONYMS = {"learning_rate": "lr", "bs": "batch_size", "steps": "max_steps", "max_length": "seq_len"}
"""Names of keys in other programs, for the hint about an unknown key."""


class Kind(Enum):
    """Type of a key."""

    BLOCK = auto()  # a model, or a union of models with different `type`
    BLOCKS = auto()  # a list of models
    MAPPING = auto()  # a dict with free keys
    LIST = auto()
    FLAG = auto()
    VALUE = auto()


@dataclass(frozen=True, slots=True)
class Node:
    """A key of the schema.

    Attributes:
        kind: type of its value.
        optional: the value can be None.
        variants: models of a block, the default one first.
        metavar: the type, as shown in `--help`.
        field: the pydantic field; None inside a mapping.
    """

    kind: Kind
    optional: bool
    variants: tuple[type[BaseConfig], ...] = ()
    metavar: str = "any"
    field: FieldInfo | None = None

    @property
    def is_union(self) -> bool:
        """Whether the block has variants, selected by its `type`."""
        return len(self.variants) > 1

    @property
    def marks(self) -> dict[str, Any]:
        """The marks of `base_config.common` and `base_config.unused`."""
        extra = self.field.json_schema_extra if self.field else None
        return extra if isinstance(extra, dict) else {}

    @property
    def description(self) -> str:
        """The docstring of the key, after `add_descriptions`."""
        text = self.field.description if self.field else None
        return (text or "") + (" (no effect)" if NO_EFFECT in self.marks else "")


ONLY = -1
"""Index of the only entry of a list of blocks, if no index was given."""

FREE = Node(Kind.VALUE, optional=True)
"""A key inside a mapping."""


@cache
def nodes_of(model: type[BaseConfig]) -> dict[str, Node]:
    """Return the keys of a model."""
    return {name: _node_of(field) for name, field in model.model_fields.items()}


def _node_of(field: FieldInfo) -> Node:
    options = _options(field.annotation)
    optional = type(None) in options
    options = tuple(option for option in options if option is not type(None))
    if models := tuple(option for option in options if _is_block(option)):
        default = default_of(field)
        first = default if isinstance(default, type) else type(default)
        return Node(Kind.BLOCK, optional, tuple(sorted(models, key=lambda m: m is not first)), "block", field)
    (option,) = options
    origin, args = typing.get_origin(option), typing.get_args(option)
    if origin is list:
        item = _bare(args[0])
        if _is_block(item):
            return Node(Kind.BLOCKS, optional, (item,), "list of blocks", field)
        return Node(Kind.LIST, optional, (), f"{item.__name__},...", field)
    if origin is dict:
        return Node(Kind.MAPPING, optional, (), "{...}", field)
    if origin is Literal:
        return Node(Kind.VALUE, optional, (), "|".join(map(str, args)), field)
    if option is bool:
        return Node(Kind.FLAG, optional, (), "true|false", field)
    return Node(Kind.VALUE, optional, (), option.__name__.replace("Path", "path"), field)


def default_of(field: FieldInfo) -> Any:
    """Return the default of a key; for a block with the defaults of its model, the model itself.

    pydantic compiles the validator of a model when the first instance is constructed, which `--help` does not need.
    """
    factory = field.default_factory
    return factory if _is_block(factory) else field.get_default(call_default_factory=True)


def tag_of(model: type[BaseConfig]) -> str:
    """Return the `type` of a variant of a union."""
    return str(model.model_fields["type"].default)


def normalise(key: str) -> str:
    """Return the snake case spelling of a key."""
    return key.replace("-", "_")


def find(root: type[BaseConfig], parts: Sequence[str | int]) -> tuple[Path, Node] | None:
    """Return the canonical path of a given path, and its node; None if there is no such key.

    An entry of a list of blocks is addressed by its index; without one, the path contains `ONLY`.
    """
    models: tuple[type[BaseConfig], ...] = (root,)
    done: list[str | int] = []
    rest = [normalise(part) if isinstance(part, str) else part for part in parts]
    node = _block(root)
    while rest:
        rest = _unalias(models, rest)
        key = rest.pop(0)
        found = next((nodes_of(model)[str(key)] for model in models if key in model.model_fields), None)
        if found is None:
            return None
        done.append(key)
        node, models = found, found.variants
        if node.kind is Kind.BLOCKS and rest:
            has_index = isinstance(rest[0], int) or rest[0].isdigit()
            done.append(int(rest.pop(0)) if has_index else ONLY)
            node = _block(*models)
        elif node.kind is Kind.MAPPING and rest:
            return (*done, *rest), FREE
    return tuple(done), node


def resolve(root: type[BaseConfig], parts: Sequence[str | int], source: str = "") -> tuple[Path, Node]:
    """Return `find`'s result. Raises ConfigError, which names the source, if there is no such key."""
    found = find(root, parts)
    if found is None:
        raise ConfigError(f"unknown key {dotted(parts)} in {source}{hint(root, parts)}")
    return found


def replace_deprecated(root: type[BaseConfig], parts: Sequence[str | int], value: Any) -> tuple[Any, str]:
    """Return the current spelling of a value, and what to use instead if its key or the value is deprecated."""
    *block, key = (normalise(part) if isinstance(part, str) else part for part in parts)
    for model in resolve(root, block)[1].variants:
        current = model.deprecated.get(str(key), str(key))
        new = model.deprecated_values.get(current, {}).get(value, value) if isinstance(value, str) else value
        if current != key or new != value:
            return new, f"use {current}" + (f" = {new}" if new != value else "")
    return value, ""


def is_alias_prefix(root: type[BaseConfig], parts: Sequence[str | int]) -> bool:
    """Whether `parts` is a prefix of an alias, such as `monitor` of `monitor.wandb`."""
    found, last = find(root, parts[:-1]), normalise(str(parts[-1]))
    variants = found[1].variants if found else ()
    return any(alias.startswith(f"{last}.") for model in variants for alias in model.aliases)


def walk(models: Sequence[type[BaseConfig]], prefix: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield every key with its node, depth first."""
    keys = {name: node for model in reversed(models) for name, node in nodes_of(model).items()}
    for name, node in keys.items():
        yield (*prefix, name), node
        yield from walk(node.variants, (*prefix, name))


@cache
def add_descriptions(model: type[BaseConfig]) -> None:
    """Set the descriptions of all fields to their docstrings.

    pydantic could do it (`use_attribute_docstrings`), but parsing every class adds 0.3 s to the start of each process.
    """
    for name, node in nodes_of(model).items():
        docs = (_docstrings(inspect.getfile(base)).get((base.__name__, name)) for base in model.__mro__[:-3])
        model.model_fields[name].description = next((doc for doc in docs if doc), None)
        for variant in node.variants:
            add_descriptions(variant)


@cache
def _docstrings(file: str) -> dict[tuple[str, str], str]:
    """Return the docstrings of the fields in a source file, by class and field."""
    found = {}
    for block in ast.parse(FilePath(file).read_text()).body:
        if isinstance(block, ast.ClassDef):
            for field, doc in zip(block.body, block.body[1:], strict=False):
                match field, doc:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[block.name, name] = inspect.cleandoc(text)
    return found


def dotted(path: Sequence[str | int]) -> str:
    """Return a path as text: `trainer.optim.lr`."""
    return ".".join(str(part) for part in path if part != ONLY)


def flag(path: Sequence[str | int]) -> str:
    """Return a path as a flag: `--trainer.optim.lr`."""
    return "--" + dotted(path).replace("_", "-")


def hint(root: type[BaseConfig], parts: Sequence[str | int]) -> str:
    """Return `; did you mean KEY?` with the known key that is closest to an unknown one, or an empty text."""
    *block, last = (normalise(str(part)) for part in parts)
    last = _SYNONYMS.get(last, last)
    keys = [dotted(known) for known, _ in walk((root,))]
    wanted = dotted((*block, last))
    same_end = sorted((key for key in keys if key.endswith(f".{last}")), key=len)
    close = difflib.get_close_matches(wanted, keys, n=1, cutoff=0.75) or same_end[:1]
    close = close or difflib.get_close_matches(wanted, keys, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _block(*variants: type[BaseConfig]) -> Node:
    return Node(Kind.BLOCK, optional=False, variants=variants, metavar="block")


def _is_block(option: Any) -> bool:
    return isinstance(option, type) and issubclass(option, BaseConfig)


def _options(annotation: Any) -> tuple[Any, ...]:
    annotation = _bare(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(option for argument in typing.get_args(annotation) for option in _options(argument))
    return (annotation,)


def _bare(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation


def _unalias(models: Sequence[type[BaseConfig]], rest: list[str | int]) -> list[str | int]:
    for model in models:
        for alias, target in {**model.deprecated, **model.aliases}.items():
            old = alias.split(".")
            if rest[: len(old)] == old:
                return [*target.split("."), *rest[len(old) :]]
    return rest
