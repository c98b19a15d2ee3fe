"""Draw the pictures of the README and write its table, from results that are committed.

    uv run python benchmarks/readme_figures.py

Writes `docs/assets/architecture.svg`, `docs/assets/reward.svg`, and the table between the markers in README.md.
`tests/unit/benchmarks/test_benchmark_scripts.py` fails if the table is not that of the results.
"""

import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs/assets"
SIMULATION = ROOT / "benchmarks/results/simulation.json"
REVERSE_TEXT = ROOT / "benchmarks/results/reverse_text_seeds.json"
README = ROOT / "README.md"
matplotlib.rcParams["svg.hashsalt"] = "prime-rl"  # the same input gives the same file
BEGIN, END = "<!-- table of benchmarks/readme_figures.py -->", "<!-- end of table -->"
K = 2
POLICIES = {
    "deadline_length_aware": "**prime-rl: deadlines, long groups first**",
    "strict_fifo": "strict FIFO",
    "discard_stale": "discard what is too old",
    "windowed_fifo": "windowed FIFO",
    "admission_gate": "admission gate",
}
_BLUE, _GREEN, _ORANGE, _GREY = "#dbe7f5", "#dff0e0", "#fbe9d3", "#eeeeee"


def main() -> None:
    """Write all of them."""
    ASSETS.mkdir(exist_ok=True)
    draw_architecture(ASSETS / "architecture.svg")
    draw_reward(json.loads(REVERSE_TEXT.read_text()), ASSETS / "reward.svg")
    README.write_text(insert_table(README.read_text(), make_table(json.loads(SIMULATION.read_text()))))


def make_table(rows: list[dict[str, Any]]) -> str:
    """Return the comparison of policies in Markdown: async level 2, four waves of rollouts per batch."""
    lines = [
        "| scheduling policy | largest staleness | efficiency | sampled tokens thrown away |",
        "|---|---|---|---|",
    ]
    for policy, label in POLICIES.items():
        row = next(
            row
            for row in rows
            if (row["policy"], row["k"], row["workload"]) == (policy, K, "four waves")
            and row["expectation"] in (None, "history")
        )
        figures = f"{row['staleness_max']} | {row['efficiency']:.3f} | {row['tokens_wasted']:.0%}"
        lines.append(f"| {label} | {figures} |")
    return "\n".join(lines)


def insert_table(page: str, table: str) -> str:
    """Return the page with `table` between the markers.

    Raises:
        ValueError: the page lacks the markers.
    """
    if BEGIN not in page or END not in page:
        raise ValueError(f"no markers {BEGIN} and {END}")
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", f"{BEGIN}\n{table}\n{END}", page, flags=re.DOTALL)


def draw_reward(results: dict[str, Any], path: Path) -> None:
    """Draw the mean reward over the steps of every recorded run, one colour for each async level."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    colours = {0: "#1d3557", 1: "#2a9d8f", 2: "#c1121f"}
    for run in results["runs"]:
        level = run["async_level"]
        label = f"async level {level}" if run["seed"] == 0 else None
        axes.plot(run["curves"]["reward"], color=colours[level], alpha=0.8, linewidth=1.4, label=label)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0.45, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    _save(figure, path)


def draw_architecture(path: Path) -> None:
    """Draw the three processes, the run directory, and what passes between them."""
    figure, axes = plt.subplots(figsize=(9.2, 3.3))
    axes.set(xlim=(0, 92), ylim=(1, 38))
    axes.axis("off")
    _box(axes, (2, 24, 24, 13), _BLUE, "orchestrator", "CPU, asyncio\nenvironments, scheduler,\nadvantages, packing")
    _box(axes, (66, 24, 24, 13), _GREEN, "inference", "vLLM with routes that\nswitch the weights")
    _box(axes, (66, 2, 24, 12), _ORANGE, "trainer", "FSDP2 under torchrun")
    _box(axes, (2, 2, 24, 12), _GREY, "run directory", "rollouts/  weights/\ncheckpoints/  metrics/")
    _arrow(axes, (26, 34.5), (66, 34.5), "prompts (HTTP)", above=True)
    _arrow(axes, (66, 31.5), (26, 31.5), "tokens, log-probabilities, version of every token")
    _arrow(axes, (26, 26.5), (66, 26.5), "switch to version n + 1", above=True)
    _arrow(axes, (26, 13), (68, 24), "")
    axes.text(49, 16.8, "weights of version n + 1", fontsize=9, va="center", ha="left")
    _arrow(axes, (12, 24), (12, 14), "")
    axes.text(13, 19, "batch n", fontsize=9, va="center")
    _arrow(axes, (26, 9), (66, 9), "batch n", above=True)
    _arrow(axes, (66, 5.5), (26, 5.5), "weights of version n + 1")
    _save(figure, path)


def _box(axes: Axes, place: tuple[float, float, float, float], colour: str, title: str, text: str) -> None:
    x, y, width, height = place
    axes.add_patch(plt.Rectangle((x, y), width, height, facecolor=colour, edgecolor="#555555", linewidth=1))
    axes.text(x + width / 2, y + height - 2.4, title, ha="center", va="center", fontsize=11, fontweight="bold")
    axes.text(x + width / 2, y + (height - 4) / 2, text, ha="center", va="center", fontsize=9)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str, above: bool = False) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#333333", "linewidth": 1.2})
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + (1.3 if above else -1.4))
    axes.text(*middle, text, ha="center", va="center", fontsize=9)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
