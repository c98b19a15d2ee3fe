"""Make a full version of a chain of deltas, which transformers and vLLM load as it is.

uv run python -m prime_rl.run.delta outputs/weights/step_9 my-model
"""

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from prime_rl.errors import ConfigError, run_main
from prime_rl.run.artifact import begin
from prime_rl.run.delta.chain import chain_of, rebuild


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and write the version.

    Raises:
        ConfigError: the target exists.
        ArtifactError: something of the chain is missing or damaged.
    """
    parser = argparse.ArgumentParser(prog="python -m prime_rl.run.delta", description=__doc__)
    parser.add_argument("version", type=Path, help="weights/step_N, published in full or as a delta")
    parser.add_argument("target", type=Path, help="directory to write; it must not exist")
    options = parser.parse_args(arguments)
    if options.target.exists():
        raise ConfigError(f"{options.target} exists already; name another directory")
    *deltas, full = chain_of(options.version)
    temporary = begin(options.target)
    try:
        rebuild(full, deltas[::-1], temporary, threads=max(1, (os.cpu_count() or 1) // 2))
        temporary.rename(options.target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


if __name__ == "__main__":
    run_main(main)
