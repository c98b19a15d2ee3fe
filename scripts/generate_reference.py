"""Write docs/reference and the texts of `--help`: `python scripts/generate_reference.py [PAGE ...] [--check]`."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import reference_config
import reference_metrics
import reference_routes

from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.synthesize import SynthesizeConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.loading import saved_help
from prime_rl.loading.help import format_help

REFERENCE = Path(__file__).parents[1] / "docs/reference"
COMMANDS = RLConfig, TrainerConfig, OrchestratorConfig, InferenceConfig, SFTConfig, EvalConfig, SynthesizeConfig
HELP = {
    saved_help.FOLDER / f"{config.command}{suffix}.txt": partial(format_help, config, everything=bool(suffix))
    for config in COMMANDS
    for suffix in ("", "_all")
}
PAGES: dict[str, dict[Path, Callable[[], str]]] = {
    "config": {REFERENCE / "config.md": reference_config.page},
    "metrics": {REFERENCE / "metrics.md": reference_metrics.page},
    "routes": {REFERENCE / "routes.md": reference_routes.page},
    "help": HELP,
}


def main() -> None:
    """Write the pages; with --check, exit with code 1 if one is out of date."""
    parser = argparse.ArgumentParser(description="Write the pages of docs/reference and the texts of --help.")
    parser.add_argument("pages", nargs="*", help=f"pages to write: {', '.join(PAGES)} (default: all)")
    parser.add_argument("--check", action="store_true", help="compare with the existing pages instead of writing them")
    arguments = parser.parse_args()
    if unknown := set(arguments.pages) - PAGES.keys():
        parser.error(f"unknown page {sorted(unknown)[0]!r}; the pages are {', '.join(PAGES)}")
    outdated = []
    for name in arguments.pages or PAGES:
        texts = {file: make() for file, make in PAGES[name].items()}
        if arguments.check:
            outdated += [name] if any(not file.is_file() or file.read_text() != texts[file] for file in texts) else []
        else:
            for file, text in texts.items():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
    if outdated:
        sys.exit(f"out of date: {', '.join(outdated)}; run `python scripts/generate_reference.py {' '.join(outdated)}`")


if __name__ == "__main__":
    main()
