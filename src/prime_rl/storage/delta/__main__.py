"""Rebuild a full version, which transformers and vLLM can load, from a chain of deltas.

uv run python -m prime_rl.storage.delta outputs/weights/step_9 my-model
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from prime_rl.core.entry_point import run_main
from prime_rl.core.errors import ConfigError
from prime_rl.storage.artifact import publish_artifact
from prime_rl.storage.delta.chain import chain_of, rebuild


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and write the version. Raises ConfigError, ArtifactError."""
    parser = argparse.ArgumentParser(prog="python -m prime_rl.storage.delta", description=__doc__)
    parser.add_argument("version", type=Path, help="weights/step_N, full or a delta")
    parser.add_argument("target", type=Path, help="directory to create; must not exist")
    options = parser.parse_args(arguments)
    if options.target.exists():
        raise ConfigError(f"{options.target} exists already; name another directory")
    *deltas, full = chain_of(options.version)
    threads = max(1, (os.cpu_count() or 1) // 2)
    publish_artifact(options.target, lambda directory: rebuild(full, deltas[::-1], directory, threads=threads))


if __name__ == "__main__":
    run_main(main)
