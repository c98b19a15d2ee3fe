"""`--help` with the common keys and `--help-all` with all keys: type, description and default from the models."""

import inspect
import textwrap
import typing
from collections.abc import Iterator

from prime_rl.loading.base_config import COMMON, BaseConfig, Topic
from prime_rl.loading.schema import Kind, Node, add_descriptions, default_of, flag, nodes_of, tag_of

_WIDTH = 110
_INDENT = 6

_USAGE = """\
Usage: uv run {command} [@ FILE.toml ...] [--key value ...] [--help | --help-all] [--dry-run]

{doc}

Sources of values, strongest first: command line, files (later files are stronger), PRIME_A__B in the environment or in
.env, defaults. `--flag` and `--no-flag` set a switch; `--block` switches an optional block on, `--no-block` off;
`--block @ FILE.toml` reads a file into a block; `--key None` unsets. `--dry-run` writes the resolved values and exits.
"""

Path = tuple[str, ...]
Key = tuple[Path, Node, object]  # path of a key, its node, its default


def format_help(root: type[BaseConfig], everything: bool) -> str:
    """Return the help text of a command: the common keys by topic, or all keys by block."""
    add_descriptions(root)
    usage = _USAGE.format(command=root.command, doc=inspect.cleandoc(root.__doc__ or ""))
    if everything:
        return "\n".join((usage, *_block(root, (), None)))
    lines = [usage]
    for topic, keys in common_keys(root).items():
        lines += [f"{topic}:", *(line for key in keys for line in _common_key(*key)), ""]
    return "\n".join((*lines, f"These are the common keys. `uv run {root.command} --help-all` shows all keys."))


def common_keys(root: type[BaseConfig]) -> dict[str, list[Key]]:
    """Return the keys that are marked with `common`, by topic.

    Keys of nested blocks are left out if the same key exists further up, as for the values that `rl` shares.
    """
    topics: dict[str, list[Key]] = {topic: [] for topic in typing.get_args(Topic)}
    seen = set[tuple[str, str]]()
    every = list(_keys((root,), (), None))
    paths = {path for path, _, _ in every}
    for path, node, default in every:
        known = (path[-1], node.description)
        shared = any(path[start:] in paths for start in range(1, len(path)))
        if COMMON in node.marks and known not in seen and not shared:
            seen.add(known)
            topics[node.marks[COMMON]].append((path, node, default))
    return {topic: keys for topic, keys in topics.items() if keys}


def default_in_block(model: type[BaseConfig], name: str, instance: BaseConfig | None) -> object:
    """Return the default of a key, in a block whose own default is `instance`.

    Without an instance it is None for a list of blocks: its entries have the defaults of their model.
    """
    if instance:
        return getattr(instance, name)
    return None if nodes_of(model)[name].kind is Kind.BLOCKS else default_of(model.model_fields[name])


def show_default(value: object) -> str:
    """Format a default as it is typed."""
    if isinstance(value, list):
        return ",".join(map(str, value)) or "empty"
    return str(value).lower() if isinstance(value, bool) else str(value)


def default_of_variant(variant: type[BaseConfig], default: object) -> BaseConfig | None:
    """Return the default of a block, or of the first entry of a list of blocks, if it is of this variant."""
    first = default[0] if isinstance(default, list) and default else default
    return first if isinstance(first, variant) else None


def _keys(models: tuple[type[BaseConfig], ...], prefix: Path, default: object) -> Iterator[Key]:
    for model in models:
        instance = default_of_variant(model, default)
        keys = [(name, node, default_in_block(model, name, instance)) for name, node in nodes_of(model).items()]
        yield from (((*prefix, name), node, value) for name, node, value in keys)
        for name, node, value in keys:
            yield from _keys(node.variants, (*prefix, name), value)


def _common_key(path: Path, node: Node, default: object) -> Iterator[str]:
    metavar = node.metavar
    if node.is_union:
        path, metavar = (*path, "type"), "|".join(tag_of(variant) for variant in node.variants)
        default = tag_of(node.variants[0])
    elif node.kind is Kind.BLOCK:
        metavar, default = "", "off" if default is None else "on"
    yield from _key_lines(path, metavar, f"{node.description} [default: {show_default(default)}]")


def _block(model: type[BaseConfig], prefix: Path, default: BaseConfig | None) -> Iterator[str]:
    """Format the keys of a block: first values, then nested blocks."""
    for name, node in nodes_of(model).items():
        if not node.variants and (name != "type" or not prefix):
            shown = show_default(default_in_block(model, name, default))
            yield from _key_lines((*prefix, name), node.metavar, f"{node.description} [default: {shown}]")
    for name, node in nodes_of(model).items():
        if node.variants:
            yield from _inner_block((*prefix, name), node, default_in_block(model, name, default))


def _inner_block(path: Path, node: Node, default: object) -> Iterator[str]:
    notes = ["off unless given"] if node.optional and default is None else []
    notes += ["may be repeated as [[...]]"] if node.kind is Kind.BLOCKS else []
    yield ""
    yield f"[{'.'.join(path)}]" + (f" ({'; '.join(notes)})" if notes else "")
    yield from _wrap(node.description)
    for variant in node.variants:
        if node.is_union:
            chosen = ", the default" if variant is node.variants[0] else ""
            yield f"  with {flag((*path, 'type'))} {tag_of(variant)}{chosen}:"
        yield from _block(variant, path, default_of_variant(variant, default))


def _key_lines(path: Path, metavar: str, text: str) -> Iterator[str]:
    # A long choice is broken between two of its names.
    typed = f"{flag(path)} {metavar}".rstrip().replace("|", "| ")
    yield from (line.replace("| ", "|") for line in _wrap(typed, first=2))
    yield from _wrap(text)


def _wrap(text: str, first: int = _INDENT) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=" " * first, subsequent_indent=" " * _INDENT, break_on_hyphens=False
    )
