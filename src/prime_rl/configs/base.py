"""What every configuration model is built on.

Models are plain data: frozen, closed to unknown keys, each field documented where it stands. Values reach them only
through the loader, which merges all sources before anything is constructed; so no validator here changes a value.
"""

import sys
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

NO_EFFECT_YET = "no_effect_yet"


def later(default: Any = None, **kwargs: Any) -> Any:
    """Declare a field of later work: it is in the schema, and the loader says so when it is set."""
    return Field(default, json_schema_extra={NO_EFFECT_YET: True}, **kwargs)


class BaseConfig(BaseModel):
    """A block of keys.

    Attributes:
        aliases: other spellings of a key of this block, as dotted paths (`monitor.wandb` -> `wandb`).
        shorthand: key that a bare value given to the whole block stands for (`--model.cp 2`), if any.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    aliases: ClassVar[dict[str, str]] = {}
    shorthand: ClassVar[str | None] = None


class RootConfig(BaseConfig):
    """The configuration of one entry point.

    Attributes:
        command: what the user types (`uv run <command>`); also names the file that `--dry-run` writes.
    """

    command: ClassVar[str]

    @classmethod
    def load(cls, argv: list[str] | None = None) -> Self:
        """Read the configuration from command line, TOML files, environment and defaults.

        Args:
            argv: the arguments after the program's name; `sys.argv[1:]` if None.

        Raises:
            ConfigError: bad input, as one line.
            SystemExit: 0, after `--help` or `--dry-run` did its work.
        """
        from prime_rl.configs.loader import load_config  # the loader needs these classes

        return load_config(cls, sys.argv[1:] if argv is None else argv)

    @classmethod
    def prepare(cls, state: Any) -> None:
        """Complete the merged values before construction (`rl` hands shared values to the three here).

        Args:
            state: `prime_rl.configs.loader.State`, changed in place.

        Raises:
            ConfigError: two places contradict each other.
        """
