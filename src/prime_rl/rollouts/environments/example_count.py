"""Counts the training examples of environments, in a process that ends afterwards.

`rl` uses it for `max_epochs`: it must not import environments itself, which may load large data or raise anything.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from prime_rl.configs.shared.blocks import EnvConfig
from prime_rl.core.entry_point import ERROR_FILE, command, read_error_file
from prime_rl.core.errors import ConfigError


def count_examples(environments: Sequence[EnvConfig]) -> int:
    """Return the number of training examples of all environments.

    Raises:
        ConfigError: one cannot be loaded.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, failure = Path(folder, "count"), Path(folder, "error")
        process = subprocess.run(
            [sys.executable, "-m", "prime_rl.rollouts.environments.example_count", str(result)],
            input=json.dumps([env.model_dump(mode="json") for env in environments]),
            text=True,
            stdout=subprocess.DEVNULL,  # environments may print
            stderr=subprocess.PIPE,
            env={**os.environ, ERROR_FILE: str(failure)},
        )
        if process.returncode == 0:
            return int(result.read_text())
        error = read_error_file(failure)
        lines = process.stderr.split("\n")
        message = error.message if error is not None else next((line for line in reversed(lines) if line), "no message")
        raise ConfigError(f"max_epochs: cannot count the examples: {message}")


@command
def main() -> None:
    """Read environments as JSON from stdin; write the sum of their examples to the file in the first argument."""
    from prime_rl.rollouts.environments.environment_loader import load

    environments = [EnvConfig.model_validate(values) for values in json.load(sys.stdin)]
    Path(sys.argv[1]).write_text(str(sum(len(load(env, None, "train")) for env in environments)))


if __name__ == "__main__":
    main()
