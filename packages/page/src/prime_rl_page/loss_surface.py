"""The loss over a plane of weights: what `loss-surface` measures and writes into the run, and its figure."""

from contextlib import suppress

import msgspec

from prime_rl.monitors.figures import Figure, grid_figure
from prime_rl.storage.paths import RunPaths


class LossSurface(msgspec.Struct, frozen=True):
    """A grid of losses.

    Attributes:
        x, y: coordinates of the grid in units of the weights.
        losses: one row per y.
        path: step, x and y of each version.
    """

    x: list[float]
    y: list[float]
    losses: list[list[float]]
    path: list[tuple[int, float, float]]

    def figure(self, three_d: bool = False) -> Figure:
        """Draw the losses, and the path of the versions through them."""
        labels = ("first direction", "second direction", "loss")
        figure = grid_figure("Loss surface", labels, self.x, self.y, self.losses, three_d)
        if not three_d:
            figure["data"][0]["type"] = "contour"
            line = {"type": "scatter", "mode": "lines+markers+text", "name": "versions", "textposition": "top center"}
            coordinates = {"x": [point[1] for point in self.path], "y": [point[2] for point in self.path]}
            figure["data"].append({**line, **coordinates, "text": [f"v{point[0]}" for point in self.path]})
        return figure


def write_loss_surface(paths: RunPaths, surface: LossSurface) -> None:
    """Write a surface into the run directory, where the page finds it. Raises OSError."""
    paths.loss_surface.write_bytes(msgspec.json.encode(surface))


def read_loss_surface(paths: RunPaths) -> LossSurface | None:
    """Return the surface that was measured last; None if there is none, or its file is damaged."""
    with suppress(OSError, msgspec.MsgspecError):
        surface = msgspec.json.decode(paths.loss_surface.read_bytes(), type=LossSurface)
        is_grid = len(surface.losses) == len(surface.y) and {len(row) for row in surface.losses} == {len(surface.x)}
        return surface if is_grid else None
    return None
