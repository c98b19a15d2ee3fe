"""Write the pages of docs/reference: `python scripts/generate_reference.py [PAGE ...] [--check]`."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import reference_config
import reference_metrics
import reference_models
import reference_routes
import reference_sampling
import reference_tinker

REFERENCE = Path(__file__).parents[1] / "docs/reference"
PAGES: dict[str, Callable[[], str]] = {
    "config": reference_config.page,
    "metrics": reference_metrics.page,
    "models": reference_models.page,
    "routes": reference_routes.page,
    "sampling": reference_sampling.page,
    "tinker": reference_tinker.page,
}


def main() -> None:
    """Write the pages; with --check, exit with code 1 if one is out of date."""
    parser = argparse.ArgumentParser(description="Write the pages of docs/reference.")
    parser.add_argument("pages", nargs="*", help=f"pages to write: {', '.join(PAGES)} (default: all)")
    parser.add_argument("--check", action="store_true", help="compare with the existing pages instead of writing them")
    arguments = parser.parse_args()
    if unknown := set(arguments.pages) - PAGES.keys():
        parser.error(f"unknown page {sorted(unknown)[0]!r}; the pages are {', '.join(PAGES)}")
    REFERENCE.mkdir(parents=True, exist_ok=True)
    outdated = []
    for name in arguments.pages or PAGES:
        file, text = REFERENCE / f"{name}.md", PAGES[name]()
        if not arguments.check:
            file.write_text(text)
        elif not file.is_file() or file.read_text() != text:
            outdated.append(name)
    if outdated:
        sys.exit(f"out of date: {', '.join(outdated)}; run `python scripts/generate_reference.py {' '.join(outdated)}`")


if __name__ == "__main__":
    main()
