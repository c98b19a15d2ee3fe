"""What every configuration model is built on.

Models are plain data: frozen, closed to unknown keys, each field documented where it stands. Values reach them only
through the loader, which merges all sources before anything is constructed; so no validator here changes a value.
"""

import re
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from prime_rl.errors import ConfigError
from prime_rl.run.paths import RunPaths

NO_EFFECT_YET = "no_effect_yet"
DEFAULT_OUTPUT_DIR = Path("outputs")
_EXP_ID = re.compile(r"[\w-][\w.-]*")


def later(default: Any = None, because: str = "has no effect yet", **kwargs: Any) -> Any:
    """Declare a field that nothing reads yet: it is in the schema, and the loader says so when it is set."""
    return Field(default, json_schema_extra={NO_EFFECT_YET: because}, **kwargs)


def _check_import_path(value: str) -> str:
    if not re.fullmatch(r"\w+(\.\w+)*[.:]\w+", value):
        raise ValueError("name your function as package.module:function")
    return value


ImportPath = Annotated[str, AfterValidator(_check_import_path)]
"""Where a function of the user's is."""


class BaseConfig(BaseModel):
    """A block of keys.

    Attributes:
        aliases: other spellings of a key of this block, as dotted paths (`monitor.wandb` -> `wandb`).
        shorthand: key that a bare value given to the whole block stands for (`--model.cp 2`), if any.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    aliases: ClassVar[dict[str, str]] = {}
    shorthand: ClassVar[str | None] = None


class RootConfig(BaseConfig):
    """The configuration of one entry point.

    Attributes:
        command: what the user types (`uv run <command>`); also names the file that `--dry-run` writes.
        variables: environment variables with a name of their own, and the key that each one sets; weaker than PRIME_.
    """

    command: ClassVar[str]
    variables: ClassVar[dict[str, str]] = {"OUTPUT_DIR": "output_dir"}

    output_dir: Path = DEFAULT_OUTPUT_DIR
    """The run directory."""

    exp_id: str | None = None
    """Name of the experiment: output_dir becomes output_dir/NAME, and W&B runs are called NAME."""

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

    @property
    def run_paths(self) -> RunPaths:
        """The run directory: output_dir, or the folder `bench` in it for a benchmark."""
        root = self.output_dir / "bench" if getattr(self, "bench", False) else self.output_dir
        return RunPaths(root, getattr(self, "visibility_seconds", None))

    def dry_run_path(self) -> Path:
        """Where `--dry-run` writes; `rl` writes run.toml, the parts of a run a file of their own beside it."""
        return RunPaths(self.output_dir).config(self.command)

    @classmethod
    def prepare(cls, state: Any) -> None:
        """Complete the merged values before construction; `rl` also hands shared values to the three here.

        Args:
            state: `prime_rl.configs.loader.State`, changed in place.

        Raises:
            ConfigError: two places contradict each other.
        """
        move_to_experiment(state)


def move_to_experiment(state: Any) -> None:
    """Apply `exp_id`: `output_dir` becomes `output_dir/exp_id`, once, so that the resolved values load to the same.

    Args:
        state: `prime_rl.configs.loader.State`, changed in place.

    Raises:
        ConfigError: the name could not be one folder.
    """
    name, origin = state.get("exp_id"), state.origin("exp_id")
    if not isinstance(name, str):
        return
    if not _EXP_ID.fullmatch(name):
        raise ConfigError(f"{state.describe('exp_id')} is not a name; use letters, digits, '-', '_' and '.'")
    base = state.get("output_dir") if state.is_set("output_dir") else DEFAULT_OUTPUT_DIR
    state.put("output_dir", str(Path(str(base)) / name), origin)
    state.put("exp_id", None, origin)
    if isinstance(state.get("wandb"), dict) and not state.is_set("wandb.name"):
        state.put("wandb.name", name, origin)
