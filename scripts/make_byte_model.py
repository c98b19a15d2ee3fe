"""Write a small random model that reads and writes any text, one token per byte of UTF-8, to try a data set on a CPU:

    uv run python scripts/make_byte_model.py byte-model
    uv run --extra cpu rl @ my.toml --model.name byte-model

It has the architecture of the model of scripts/make_reverse_text_model.py, 427,776 parameters and a context of 32,768
tokens. Its replies are random bytes. `uv run rl init` writes the same model.
"""

import argparse
from pathlib import Path

from prime_rl.entrypoints.init.byte_model import write_byte_model

TEMPLATE = Path(__file__).parents[1] / "configs/chat_templates/tools.jinja"


def main() -> None:
    """Write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory to write; it must be new or empty")
    directory = parser.parse_args().directory
    if directory.exists() and not (directory.is_dir() and next(directory.iterdir(), None) is None):
        parser.error(f"{directory} exists; name a new directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"{directory} cannot be created: {error.strerror}")
    write_byte_model(directory, TEMPLATE.read_text(encoding="utf-8"))
    print(f"wrote {directory}")


if __name__ == "__main__":
    main()
