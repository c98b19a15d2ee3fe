"""`plots <output_dir>`: write the figures of a run to one HTML file."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from prime_rl.core.entry_point import command
from prime_rl.core.errors import ConfigError
from prime_rl.core.os_errors import wrap_os_errors
from prime_rl.doctor.collect import read_toml
from prime_rl.plots.figures import check_plotly_installed
from prime_rl.plots.loss_surface import read_loss_surface, write_loss_surface
from prime_rl.plots.run_plots import pass_threshold, read_history, write_html
from prime_rl.storage.paths import RunPaths


@command
def main() -> None:
    """Write the figures of a run."""
    _main(sys.argv[1:])


def _main(argv: Sequence[str]) -> None:
    description = "Write the figures of a run to one HTML file: rewards, advantages, gradient norms, pass@k."
    parser = argparse.ArgumentParser(prog="plots", description=description)
    parser.add_argument("output_dir", help="the run directory")
    parser.add_argument("--out", type=Path, help="the file; the default is plots.html in the run directory")
    parser.add_argument("--3d", dest="three_d", action="store_true", help="draw surfaces instead of heatmaps")
    parser.add_argument(
        "--pass-threshold", type=float, help="reward of a rollout that solves its example; the default is the run's"
    )
    parser.add_argument(
        "--loss-surface", action="store_true", help="measure the loss around the run's versions (121 passes)"
    )
    parser.add_argument("--batch", type=int, help="batch of the loss surface; the default is the newest kept one")
    arguments = parser.parse_args(argv)
    check_plotly_installed("plots")
    paths = RunPaths(Path(arguments.output_dir))
    threshold = arguments.pass_threshold
    threshold = pass_threshold(read_toml(paths.run_toml)) if threshold is None else threshold
    figures = read_history(paths, threshold).figures(arguments.three_d)
    if arguments.loss_surface:
        from prime_rl.trainer.rl.loss_surface import measure_loss_surface  # imports torch

        with wrap_os_errors("write the loss surface", paths.loss_surface):
            write_loss_surface(paths, measure_loss_surface(paths, arguments.batch))
    if (found := read_loss_surface(paths)) is not None:
        figures["loss_surface"] = found.figure(arguments.three_d)
    if not figures:
        raise ConfigError(f"{paths.root} contains neither samples/ nor metrics with gradient norms of layers")
    target = arguments.out or paths.root / "plots.html"
    with wrap_os_errors("write the figures", target):
        write_html(figures, target)
    print(f"wrote {', '.join(figures)} to {target}")


if __name__ == "__main__":
    main()
