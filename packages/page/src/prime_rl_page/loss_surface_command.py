"""`loss-surface <output_dir>`: measure the loss around the versions of a run, for the page and its report."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from prime_rl.core.entry_point import ArgumentParser, command, uv_run
from prime_rl.core.os_errors import wrap_os_errors
from prime_rl.storage.paths import RunPaths
from prime_rl_page.loss_surface import write_loss_surface


@command
def main() -> None:
    """Measure the surface and write it into the run directory."""
    _main(sys.argv[1:])


def _main(argv: Sequence[str]) -> None:
    description = "Measure the loss of one batch around the versions of a run; the page shows it (121 forward passes)."
    parser = ArgumentParser(prog="loss-surface", description=description)
    parser.add_argument("output_dir", help="the run directory")
    parser.add_argument("--batch", type=int, help="a batch whose rows are kept; the default is the newest one")
    arguments = parser.parse_args(argv)
    paths = RunPaths(Path(arguments.output_dir))
    from prime_rl_page.loss_measurement import measure_loss_surface  # imports torch

    surface = measure_loss_surface(paths, arguments.batch)
    with wrap_os_errors("write the loss surface", paths.loss_surface):
        write_loss_surface(paths, surface)
    print(f"wrote {paths.loss_surface}; `{uv_run()}page {shlex.quote(str(paths.root))}` shows it under Plots")


if __name__ == "__main__":
    main()
