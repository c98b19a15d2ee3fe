"""Plot of the simulation: efficiency over maximum staleness, with the wasted tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

OURS = {
    "deadline_length_aware": ("deadline, length-aware", "#c1121f", "*", 170),
    "deadline": ("deadline", "#c1121f", "o", 60),
}
OTHERS = {
    "synchronous": ("synchronous", "#1d3557", "X", 60),
    "one_step_off": ("one step off", "#1d3557", "P", 60),
    "strict_fifo": ("strict FIFO", "#457b9d", "s", 45),
    "windowed_fifo": ("windowed FIFO", "#2a9d8f", "D", 45),
    "admission_gate": ("admission gate", "#6a994e", "^", 60),
    "ship_hold": ("ship hold", "#8d6a9f", "v", 60),
    "discard_stale": ("discard stale", "#e09f3e", "h", 70),
}
STYLES = OTHERS | OURS


def draw_plot(table: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a plot with one panel for each workload without drops to `path`."""
    rows = [row for row in table if row["policy"] in OTHERS or row["bound"] == row["k"]]
    rows = [row for row in rows if row["expectation"] in (None, "history")]
    names = [name for name in dict.fromkeys(row["workload"] for row in rows) if "dropped" not in name]
    figure, panels = plt.subplots(1, len(names), figsize=(6.2 * len(names), 4.8), squeeze=False)
    for axes, name in zip(panels[0], names, strict=True):
        draw_panel(axes, name, [row for row in rows if row["workload"] == name])
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_panel(axes: Axes, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Plot the policies of one workload: a line through the levels k, each with k and its waste."""
    for policy, (label, colour, marker, size) in STYLES.items():
        points = [row for row in rows if row["policy"] == policy]
        x, y = [row["staleness_max"] for row in points], [row["efficiency"] for row in points]
        axes.plot(x, y, color=colour, linewidth=1, alpha=0.5, zorder=2)
        axes.scatter(x, y, s=size, color=colour, marker=marker, label=label, zorder=3 + (policy in OURS))
        for row in points:
            note, offset = annotation(row)
            place = (row["staleness_max"], row["efficiency"])
            axes.annotate(note, place, offset, textcoords="offset points", fontsize=7, color=colour)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_ylim(0, 1.08)
    axes.set_xlim(left=-0.25 * max(row["staleness_max"] for row in rows) ** 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("largest staleness of a trained token, versions")
    axes.set_ylabel("efficiency")
    axes.set_title(f"{name[0].upper()}{name[1:]}", fontsize=11)
    axes.grid(alpha=0.2)


def annotation(row: dict[str, Any]) -> tuple[str, tuple[int, int]]:
    """Return the label of a point and its offset in points."""
    if row["tokens_wasted"] >= 0.005:
        return f"{row['tokens_wasted']:.0%} thrown away", (-64, 5) if row["efficiency"] < 0.9 else (-64, -13)
    if row["policy"] in ("deadline_length_aware", "windowed_fifo", "admission_gate"):
        return f"k={row['k']}", (6, -11)
    return "", (0, 0)
