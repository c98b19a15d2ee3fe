"""Draw the screenshots of docs/monitoring.md: `uv run python benchmarks/page_screenshots.py [DIRECTORY]`.

Needs Debian's chromium. Without a run directory it writes a synthetic run, so the pictures show made-up values.
"""

import argparse
import io
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from synthetic_run import STEP_SECONDS, write_run

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.browser import open_browser

ASSETS = Path(__file__).parents[1] / "docs/assets"
MAX_BYTES = 150_000
SIZE = {"width": 1280, "height": 800}
STEPS = 240


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.directory is None:
            paths = write_run(Path(folder) / "outputs", STEPS, groups_per_step=4)
            paths.run_toml.write_text(f"max_steps = {STEPS}\nasync_level = 2\n")
        root, place = arguments.directory or Path("outputs"), folder if arguments.directory is None else None
        command = [sys.executable, "-m", "prime_rl_page", str(root), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=place) as process:
            assert process.stdout is not None
            draw(process.stdout.readline().split()[1])
            process.terminate()


def draw(address: str) -> None:
    """Open each view and save its picture, with fewer colours to stay small."""
    last = STEPS - 1
    views = {
        "page_overview": ("", "light", ".chart canvas"),
        "page_timeline": (f"view=timeline&from={1_800_000_000 + STEP_SECONDS * (STEPS - 12)}", "dark", ".lane canvas"),
        "page_rollouts": (f"view=rollouts&rollout={last}.{last * 4}.0&colour=difference", "light", ".tokens span"),
        "page_plots": ("view=plots", "light", ".plots canvas"),
    }
    with open_browser() as browser:
        for name, (state, theme, ready) in views.items():
            tab = browser.new_page(viewport=SIZE, color_scheme=theme)
            tab.goto(f"{address}/#{state}")
            tab.locator(ready).first.wait_for()
            tab.locator(".state").wait_for()
            picture = Image.open(io.BytesIO(tab.screenshot())).convert("RGB").quantize(96, dither=Image.Dither.NONE)
            picture.save(ASSETS / f"{name}.png", optimize=True)
            size = (ASSETS / f"{name}.png").stat().st_size
            assert size <= MAX_BYTES, f"{name}.png has {size} bytes"
            print(f"{name}.png: {size / 1000:.0f} kB")
            tab.close()


if __name__ == "__main__":
    main()
