"""The base class of a command's configuration, and the loader that merges its sources.

Also `--help` with the common keys and `--help-all` with all keys: type, description and default from the models.
"""

import inspect
import os
import re
import sys
import textwrap
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, ValidationError

from prime_rl.configs.loading.base_config import COMMON, BaseConfig, Topic, common, substitute, to_toml, write_config
from prime_rl.configs.loading.provenance import (
    Assignment,
    ConfigState,
    complete,
    explain,
    keys_without_effect,
    refuse_bools_as_numbers,
    refuse_secrets,
    refuse_unusable_values,
)
from prime_rl.configs.loading.schema import Kind, Node, add_descriptions, default_of, flag, nodes_of, tag_of
from prime_rl.configs.loading.sources import CommandLine, read_environment, read_values, take_wandb_variables, warn
from prime_rl.core.entry_point import exit_with_reader
from prime_rl.core.errors import ConfigError
from prime_rl.liveness.parent_process import SUPERVISED
from prime_rl.storage.paths import RunPaths

_WIDTH = 110
_INDENT = 6

_USAGE = """\
Usage: uv run {command} [@ FILE.toml ...] [--key value ...] [--help | --help-all] [--dry-run]

{doc}

Sources of values, strongest first: command line, files (later files are stronger), PRIME_A__B in the environment or in
.env, defaults. `--flag` and `--no-flag` set a switch; `--block` switches an optional block on, `--no-block` off;
`--block @ FILE.toml` reads a file into a block; `--key None` unsets. `--dry-run` prints the resolved values and exits;
environments are imported for it, which takes some seconds, but neither their data nor the model is loaded.
"""

KeyPath = tuple[str, ...]
Key = tuple[KeyPath, Node, object]  # path of a key, its node, its default
DEFAULT_OUTPUT_DIR = Path("outputs")


def format_help(root: type[BaseConfig], everything: bool) -> str:
    """Return the help text of a command: the common keys by topic, or all keys by block."""
    add_descriptions(root)
    usage = _USAGE.format(command=root.command_name, doc=inspect.cleandoc(root.__doc__ or ""))
    if everything:
        return "\n".join((usage, *_block(root, (), None)))
    lines = [usage]
    for topic, keys in common_keys(root).items():
        lines += [f"{topic}:", *(line for key in keys for line in _common_key(*key)), ""]
    return "\n".join((*lines, f"These are the common keys. `uv run {root.command_name} --help-all` shows all keys."))


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


def _keys(models: tuple[type[BaseConfig], ...], prefix: KeyPath, default: object) -> Iterator[Key]:
    for model in models:
        instance = default_of_variant(model, default)
        keys = [(name, node, default_in_block(model, name, instance)) for name, node in nodes_of(model).items()]
        yield from (((*prefix, name), node, value) for name, node, value in keys)
        for name, node, value in keys:
            yield from _keys(node.variants, (*prefix, name), value)


def _common_key(path: KeyPath, node: Node, default: object) -> Iterator[str]:
    metavar = node.metavar
    if node.is_union:
        path, metavar = (*path, "type"), "|".join(tag_of(variant) for variant in node.variants)
        default = tag_of(node.variants[0])
    elif node.kind is Kind.BLOCK:
        metavar, default = "", "off" if default is None else "on"
    yield from _key_lines(path, metavar, f"{node.description} [default: {show_default(default)}]")


def _block(model: type[BaseConfig], prefix: KeyPath, default: BaseConfig | None) -> Iterator[str]:
    """Format the keys of a block: first values, then nested blocks."""
    for name, node in nodes_of(model).items():
        if not node.variants and (name != "type" or not prefix or node.optional):
            shown = show_default(default_in_block(model, name, default))
            yield from _key_lines((*prefix, name), node.metavar, f"{node.description} [default: {shown}]")
    for name, node in nodes_of(model).items():
        if node.variants:
            yield from _inner_block((*prefix, name), node, default_in_block(model, name, default))


def _inner_block(path: KeyPath, node: Node, default: object) -> Iterator[str]:
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


def _key_lines(path: KeyPath, metavar: str, text: str) -> Iterator[str]:
    # A long choice is broken between two of its names.
    typed = f"{flag(path)} {metavar}".rstrip().replace("|", "| ")
    yield from (line.replace("| ", "|") for line in _wrap(typed, first=2))
    yield from _wrap(text)


def _wrap(text: str, first: int = _INDENT) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=" " * first, subsequent_indent=" " * _INDENT, break_on_hyphens=False
    )


class RootConfig(BaseConfig):
    """The configuration of one command."""

    variables: ClassVar[dict[str, str]] = {"OUTPUT_DIR": "output_dir"}

    output_dir: Path = Field(DEFAULT_OUTPUT_DIR, json_schema_extra=common("Run"))
    """The run directory."""

    exp_id: str | None = Field(None, json_schema_extra=common("Run"))
    """Name of the experiment: output_dir becomes output_dir/NAME, and W&B, trackio and MLflow call the runs NAME."""

    @classmethod
    def load(
        cls,
        argv: list[str] | None = None,
        values: Mapping[str, object] | None = None,
        check: Callable[[Self], object] | None = None,
    ) -> Self:
        """Read the configuration from `argv` (None: `sys.argv[1:]`), TOML files, environment and defaults.

        Args:
            argv: the command line.
            values: values of a Python program, which rank as flags: nested dicts, or keys with dots.
            check: raises ConfigError for what the command refuses after reading; called for `--dry-run`.

        Raises:
            ConfigError: bad input, as one line.
            SystemExit: 0, after `--help` or `--dry-run`.
        """
        line = CommandLine(cls, sys.argv[1:] if argv is None else argv)
        if line.actions & {"--help", "--help-all"}:
            with exit_with_reader():
                print(format_help(cls, everything="--help-all" in line.actions))
            sys.exit(0)
        state = ConfigState(cls)
        sources = (read_environment(cls), *line.files)
        for source in sources:
            state.apply(source)
        flags, negations = state.hold_back(line.flags)
        state.apply(flags)
        given = read_values(cls, values or {})
        state.apply(given)
        for source in (*sources, line.flags, given):
            for warning in (assignment.warning for assignment in source if assignment.warning):
                warn(warning)
        config = cls.build(state, negations)
        for key, reason in keys_without_effect(config):
            warn(f"{key} {reason}")
        for warning in config.doubtful():
            warn(warning)
        if "--dry-run" in line.actions:
            if check is not None:
                check(config)
            with exit_with_reader():
                print(to_toml(config), end="")
            sys.exit(0)
        return config

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a configuration that `record` wrote, of another process. Raises ConfigError in one line."""
        try:
            return cls.model_validate(substitute(tomllib.loads(file.read_text(encoding="utf-8")), "None", None))
        except ValidationError as error:
            first = error.errors()[0]
            problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        except (OSError, ValueError) as error:
            problem = str(error)
        raise ConfigError(f"{file}: {problem}")

    @property
    def run_paths(self) -> RunPaths:
        """The run directory."""
        return RunPaths(self.output_dir)

    def record(self, paths: RunPaths, name: str | None = None) -> None:
        """Write this to `paths.config(name)` (default: the command's name); `rl` does it for its processes.

        Raises:
            ConfigError: the directory cannot be written.
        """
        if os.environ.get(SUPERVISED) != "1":
            write_config(self, paths.config(name or self.command_name))

    @classmethod
    def prepare(cls, state: ConfigState) -> None:
        """Complete the merged values before construction. Raises ConfigError if two values contradict each other."""
        if state.get("output_dir") == "":  # an unset variable, not the working directory
            raise ConfigError(f"{state.describe('output_dir')} is empty; set a directory, such as outputs")
        name, origin = state.get("exp_id"), state.origin("exp_id")
        if not isinstance(name, str):
            return
        if not re.fullmatch(r"[\w-][\w.-]*", name):
            raise ConfigError(f"{state.describe('exp_id')} is not a name; use letters, digits, '-', '_' and '.'")
        # output_dir contains the name, and exp_id is cleared, so that the resolved values load to the same.
        state.put("output_dir", str(Path(str(state.get("output_dir", DEFAULT_OUTPUT_DIR))) / name), origin)
        state.put("exp_id", None, origin)
        for logger in filter(state.is_on, ("wandb", "trackio", "mlflow")):
            state.fill(f"{logger}.name", name, origin)

    @classmethod
    def build(cls, state: ConfigState, negations: Sequence[Assignment] = ()) -> Self:
        """Construct the models from merged values and the `negations` that `ConfigState.hold_back` has held back.

        Raises:
            ConfigError: a wrong type, contradicting values, a secret; names the source.
        """
        refuse_secrets(state)
        refuse_bools_as_numbers(state)
        take_wandb_variables(state)
        cls.prepare(state)
        for negation in negations:
            if state.reaches(negation.path):
                state.apply([negation])
            else:
                warn(f"{negation.origin.label} has no effect: its block is off")
        try:
            config = cls.model_validate(complete(cls, state.values))
        except ValidationError as error:
            raise ConfigError(explain(error, state)) from None
        refuse_unusable_values(config, state)
        folder = config.output_dir
        there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
        if not there.is_dir():
            kind = "a symbolic link to nothing" if there.is_symlink() else "a file"
            raise ConfigError(f"output_dir = {folder} cannot be written: {there} is {kind}; set --output-dir")
        return config
