"""The base class of a command's configuration, and the loader that merges its sources."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, ValidationError

from prime_rl.core.entry_point import exit_with_reader
from prime_rl.core.errors import ConfigError
from prime_rl.liveness.parent_process import SUPERVISED
from prime_rl.loading.base_config import BaseConfig, common
from prime_rl.loading.command_line import CommandLine
from prime_rl.loading.diagnostics import explain, keys_without_effect, refuse_bools_as_numbers, refuse_secrets
from prime_rl.loading.dump import write_config
from prime_rl.loading.help import format_help
from prime_rl.loading.provenance import Assignment, ConfigState, complete
from prime_rl.loading.sources import read_environment, read_values, take_wandb_variables
from prime_rl.storage.paths import RunPaths

DEFAULT_OUTPUT_DIR = Path("outputs")


class RootConfig(BaseConfig):
    """The configuration of one command."""

    variables: ClassVar[dict[str, str]] = {"OUTPUT_DIR": "output_dir"}

    output_dir: Path = Field(DEFAULT_OUTPUT_DIR, json_schema_extra=common("Run"))
    """The run directory."""

    exp_id: str | None = Field(None, json_schema_extra=common("Run"))
    """Name of the experiment: output_dir becomes output_dir/NAME, and runs of W&B and trackio are called NAME."""

    @classmethod
    def load(cls, argv: list[str] | None = None, values: Mapping[str, object] | None = None) -> Self:
        """Read the configuration from `argv` (None: `sys.argv[1:]`), TOML files, environment and defaults.

        Args:
            argv: the command line.
            values: values of a Python program, which rank as flags: nested dicts, or keys with dots.

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
                _warn(warning)
        config = cls.build(state, negations)
        for key, reason in keys_without_effect(config):
            _warn(f"{key} {reason}")
        if "--dry-run" in line.actions:
            paths = RunPaths(config.output_dir)
            path = paths.run_toml if cls.command == "rl" else paths.config(cls.command)
            write_config(config, path)
            print(f"wrote the resolved configuration to {path}; nothing was started")
            sys.exit(0)
        return config

    @property
    def run_paths(self) -> RunPaths:
        """The run directory."""
        return RunPaths(self.output_dir)

    @classmethod
    def prepare(cls, state: ConfigState) -> None:
        """Complete the merged values before construction. Raises ConfigError if two values contradict each other."""
        name, origin = state.get("exp_id"), state.origin("exp_id")
        if not isinstance(name, str):
            return
        if not re.fullmatch(r"[\w-][\w.-]*", name):
            raise ConfigError(f"{state.describe('exp_id')} is not a name; use letters, digits, '-', '_' and '.'")
        # output_dir contains the name, and exp_id is cleared, so that the resolved values load to the same.
        state.put("output_dir", str(Path(str(state.get("output_dir", DEFAULT_OUTPUT_DIR))) / name), origin)
        state.put("exp_id", None, origin)
        for logger in filter(state.is_on, ("wandb", "trackio")):
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
                _warn(f"{negation.origin.label} has no effect: its block is off")
        try:
            return cls.model_validate(complete(cls, state.values))
        except ValidationError as error:
            raise ConfigError(explain(error, state)) from None


def _warn(text: str) -> None:
    """Print a warning once per run: only `rl` and rank 0 print."""
    if os.environ.get(SUPERVISED) != "1" and os.environ.get("RANK", "0") == "0":
        print(f"warning: {text}", file=sys.stderr)
