"""The `--help` of the commands as files, which `python scripts/generate_reference.py help` writes.

Printing a file takes a tenth of the time of building the configuration models that it describes.
"""

import sys
from pathlib import Path

from prime_rl.core.entry_point import exit_with_reader

FOLDER = Path(__file__).parent / "help_texts"
OPTIONS = {"--help": "", "-h": "", "--help-all": "_all"}


def print_saved_help(command: str) -> None:
    """Print the help of a command and exit, if its only argument is `--help`, `-h` or `--help-all`."""
    if len(sys.argv) == 2 and (suffix := OPTIONS.get(sys.argv[1])) is not None:
        with exit_with_reader():
            print((FOLDER / f"{command}{suffix}.txt").read_text())
        sys.exit(0)
