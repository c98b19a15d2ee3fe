"""The base class of all configuration models, which can be written as TOML that loads to the same values."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from prime_rl.core.errors import translate_error, unwritable

NO_EFFECT = "no_effect"
COMMON = "common"
Topic = Literal[
    "Run", "Model", "Data", "GPUs", "Algorithm", "Rollouts", "Training", "Memory and parallelism", "Inference",
    "Evaluation", "Checkpoints", "Logging",
]  # fmt: skip
"""Headings of `--help`, in their order."""


def unused(default: Any = None, because: str = "has no effect", **kwargs: Any) -> Any:
    """Declare a field that nothing reads; setting it logs a warning with the reason."""
    return Field(default, json_schema_extra={NO_EFFECT: because}, **kwargs)


def common(topic: Topic) -> dict[str, JsonValue]:
    """Mark a field (`json_schema_extra`) that `--help` shows, under the heading `topic`."""
    return {COMMON: topic}


def _check_import_path(value: str) -> str:
    if not re.fullmatch(r"\w+(\.\w+)*[.:]\w+|.+\.py:\w+", value):
        raise ValueError("name your function as package.module:function or folder/file.py:function")
    return value


ImportPath = Annotated[str, AfterValidator(_check_import_path)]
"""Import path of a user's function."""


class BaseConfig(BaseModel):
    """A block of keys: frozen, closed to unknown keys. The docstring of a field is its description in `--help`.

    The loader merges all sources before it constructs a model, so validators check values and never change them. The
    tables below contain the entries of the base classes.

    Attributes:
        aliases: other spellings of keys of this block, as dotted paths (`monitor.wandb` -> `wandb`).
        deprecated: former names of keys of this block, which log a warning.
        deprecated_values: former values of keys of this block, which log a warning.
        shorthand: the key that a bare value of the whole block sets (`--model.cp 2`), if any.
        command_name: the command that a top-level model configures (`uv run <command>`).
        variables: environment variables without the prefix PRIME_, and the key that each one sets (top-level models).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, defer_build=True)

    aliases: ClassVar[dict[str, str]] = {}
    deprecated: ClassVar[dict[str, str]] = {}
    deprecated_values: ClassVar[dict[str, dict[str, str]]] = {}
    shorthand: ClassVar[str | None] = None
    command_name: ClassVar[str] = ""
    variables: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for table in ("aliases", "deprecated", "deprecated_values", "variables"):
            own = (vars(base).get(table, {}) for base in reversed(cls.__mro__))
            setattr(cls, table, {key: value for entries in own for key, value in entries.items()})

    @model_validator(mode="before")
    @classmethod
    def _accept_deprecated(cls, values: Any) -> Any:
        # Values that do not pass through the loader: `run.toml` and checkpoints of an earlier release.
        if not isinstance(values, dict):
            return values
        renamed = {cls.deprecated.get(key, key): value for key, value in values.items()}
        former = {key: names.get(str(renamed.get(key))) for key, names in cls.deprecated_values.items()}
        return renamed | {key: value for key, value in former.items() if value is not None}

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Yield keys of this block that have no effect with these values, with the reason and the key to set instead.

        The loader warns about each one that differs from its default. Validators reject misleading combinations.
        """
        yield from ()

    def doubtful(self, prefix: str = "") -> Iterator[str]:
        """Yield a warning for each combination of values that is allowed and probably not meant.

        The loader prints those of a command's configuration. `prefix` is put before the keys.
        """
        yield from ()

    def without_effect_alone(self) -> Iterator[tuple[str, str]]:
        """Yield keys as `without_effect` does, but only for a command that `rl` did not start."""
        yield from ()


def to_toml(config: BaseConfig) -> str:
    """Return the complete configuration as TOML."""
    head = f"# Resolved configuration of `{config.command_name}`; `uv run {config.command_name} @ FILE` repeats it.\n\n"
    return head + as_toml(config.model_dump(mode="json"))


def as_toml(values: dict[str, Any]) -> str:
    """Return nested values as TOML."""
    return tomli_w.dumps(substitute(values, None, "None"))


def write_config(config: BaseConfig, path: Path) -> None:
    """Write `to_toml` to `path` by rename. Raises ConfigError if the directory cannot be written."""
    with translate_error(OSError, unwritable(f"cannot write {path}")):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
        temporary.write_text(to_toml(config), encoding="utf-8")
        temporary.replace(path)


def substitute(value: Any, old: str | None, new: str | None) -> Any:
    """Replace `old` by `new` in nested values. TOML has no null: "None" stands for it."""
    if isinstance(value, dict):
        return {key: substitute(inner, old, new) for key, inner in value.items()}
    if isinstance(value, list):
        return [substitute(inner, old, new) for inner in value]
    return new if value == old else value
