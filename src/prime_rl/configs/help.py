"""`--help`: every key with its type, doc and default, printed from the models."""

import inspect
import textwrap
from collections.abc import Iterator

from prime_rl.configs.base import NO_EFFECT_YET, BaseConfig, RootConfig
from prime_rl.configs.schema import Kind, Node, flag, node_of, tag_of

_WIDTH = 110
_INDENT = 6

_USAGE = """\
Usage: uv run {command} [@ FILE.toml ...] [--key value ...] [--help] [--dry-run]

{doc}

Values come from the command line, then the files (later ones win), then PRIME_A__B in the environment or .env, then
the defaults below. `--flag` and `--no-flag` set a switch; `--block` alone switches an optional block on, `--no-block`
off; `--block @ FILE.toml` reads a file into a block; `--key None` unsets. `--dry-run` writes the resolved values and
exits.
"""


def format_help(root: type[RootConfig]) -> str:
    """The whole help text of an entry point."""
    usage = _USAGE.format(command=root.command, doc=_doc(root))
    return usage + "\n" + "\n".join(_block(root, (), None))


def _block(model: type[BaseConfig], prefix: tuple[str, ...], default: BaseConfig | None) -> Iterator[str]:
    """Keys of one block, plain ones first, then the blocks inside it."""
    nodes = {name: node_of(field) for name, field in model.model_fields.items()}
    for name, node in nodes.items():
        if not node.variants:
            yield from _key((*prefix, name), node, _default(model, name, default))
    for name, node in nodes.items():
        if node.variants:
            yield from _inner_block((*prefix, name), node, _default(model, name, default))


def _inner_block(path: tuple[str, ...], node: Node, default: object) -> Iterator[str]:
    assert node.field is not None
    state = "off unless given; " if node.optional and default is None else ""
    kind = "may be repeated as [[...]]; " if node.kind is Kind.BLOCKS else ""
    note = f" ({(state + kind).rstrip('; ')})" if state or kind else ""
    yield ""
    yield f"[{'.'.join(path)}]{note}"
    yield from _wrap((node.field.description or "") + _later(node))
    for variant in node.variants:
        inner = default if isinstance(default, variant) else None
        if isinstance(default, list) and default and isinstance(default[0], variant):
            inner = default[0]
        if node.is_union:
            chosen = ", the default" if variant is node.variants[0] else ""
            yield f"  with {flag((*path, 'type'))} {tag_of(variant)}{chosen}:"
        yield from _block(variant, path, inner)


def _key(path: tuple[str, ...], node: Node, default: object) -> Iterator[str]:
    assert node.field is not None
    if path[-1] == "type" and len(path) > 1:
        return
    # A long choice is broken between two of its names.
    typed = f"{flag(path)} {node.metavar}".replace("|", "| ")
    yield from (line.replace("| ", "|") for line in _wrap(typed, first=2))
    yield from _wrap(f"{node.field.description}{_later(node)} [default: {_show(default)}]")


def _default(model: type[BaseConfig], name: str, instance: BaseConfig | None) -> object:
    return getattr(instance, name) if instance else model.model_fields[name].get_default(call_default_factory=True)


def _later(node: Node) -> str:
    extra = node.field.json_schema_extra if node.field else None
    return " (no effect yet)" if isinstance(extra, dict) and NO_EFFECT_YET in extra else ""


def _show(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(str(item) for item in value) or "empty"
    return str(value)


def _wrap(text: str, first: int = _INDENT) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=" " * first, subsequent_indent=" " * _INDENT, break_on_hyphens=False
    )


def _doc(model: type[BaseConfig]) -> str:
    return inspect.cleandoc(model.__doc__ or "")
