"""Fill of packed rows and balance of the ranks for typical length distributions.

    uv run python benchmarks/packing.py --json benchmarks/results/packing.json

No model and no GPU; a few seconds. The baseline is first-fit-decreasing with rows assigned round-robin. Prints two
tables; `--json FILE` writes one record per distribution.

bins / bound  rows of best-fit-decreasing over a lower bound (limit 1.0); `rows` is the number of shipped rows, which is
              slightly larger so that rows cost the same and common numbers of ranks divide it
imbalance     FLOPs of the busiest rank over the mean (limit 1.0)
step          the same if ranks wait for each other at every row, as with sharded weights: the sum over positions of the
              most expensive row, over the mean sum of a rank (limit 1.0)

All are means over seeds. FLOPs are those of a 0.6B model (28 layers, hidden 1024, 16 heads of 128).
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_rl.orchestrator.packing import RowCost, best_fit_decreasing, even_rows
from prime_rl.trainer.micro_batch import PADDING_ROW, assign_rows

MODEL = {
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151936,
}  # fmt: skip
WORLDS = (1, 2, 4, 8)
SEEDS = 10

Draw = Callable[[np.random.Generator], NDArray[np.float64]]


def lognormal(median: float, sigma: float, count: int) -> Draw:
    return lambda random: random.lognormal(np.log(median), sigma, count)


def turns(random: np.random.Generator) -> NDArray[np.float64]:
    """Draw branching rollouts: the sample of turn t contains all earlier turns."""
    added = random.lognormal(np.log(500), 0.6, (64, 5))
    played = random.integers(1, 6, 64)
    return np.concatenate([np.cumsum(row[:count]) for row, count in zip(added, played, strict=True)])


# Name: (row length, lengths of the samples; longer ones are truncated, like max_tokens does).
DISTRIBUTIONS: dict[str, tuple[int, Draw]] = {
    "short answers": (2048, lognormal(60, 0.5, 128)),
    "grade-school math": (2048, lognormal(300, 0.5, 512)),
    "competition math": (4096, lognormal(900, 0.7, 512)),
    "reasoning, a fifth cut": (16384, lognormal(8000, 0.85, 512)),
    "long reasoning": (65536, lognormal(12000, 1.0, 256)),
    "branching turns": (8192, turns),
    "uniform": (8192, lambda random: random.uniform(1, 8192, 256)),
    "equal": (8192, lambda random: np.full(128, 2400.0)),
    "large batch": (8192, lognormal(1500, 0.8, 4096)),
}


def main() -> None:
    arguments = parse_arguments()
    records = [measure(name, *DISTRIBUTIONS[name]) for name in DISTRIBUTIONS]
    print_tables(records)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(records, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def measure(name: str, capacity: int, draw: Draw) -> dict[str, Any]:
    """Pack and assign one distribution with every seed; return the means."""
    runs = [measure_once(capacity, draw, seed) for seed in range(SEEDS)]
    means = {key: round(float(np.mean([run[key] for run in runs])), 4) for key in runs[0]}
    return {"distribution": name, "row_length": capacity, **means}


def measure_once(capacity: int, draw: Draw, seed: int) -> dict[str, float]:
    lengths = np.clip(draw(np.random.default_rng(seed)), 2, capacity).astype(int).tolist()
    costs = RowCost.of(MODEL)(np.array(lengths), np.array(lengths) - 1)
    begin = time.process_time()
    rows = even_rows(lengths, costs.tolist(), capacity)
    elapsed = time.process_time() - begin
    row_costs = [float(costs[row].sum()) for row in rows]
    plain = first_fit_decreasing(lengths, capacity)
    plain_costs = [float(costs[row].sum()) for row in plain]
    packed = best_fit_decreasing(lengths, capacity)
    bound = fewest_rows(lengths, capacity)
    result = {
        "samples": len(lengths),
        "bound": bound,
        "bins": len(packed),
        "bins_over_bound": len(packed) / bound,
        "ffd_bins_over_bound": len(plain) / bound,
        "rows": len(rows),
        "cpu_ms": 1e3 * elapsed,
    }
    for world in WORLDS:
        imbalance, step = balance(row_costs, assign_rows(row_costs, world))
        result |= {f"imbalance_{world}": imbalance, f"step_{world}": step}
        in_turn = [list(range(rank, len(plain), world)) for rank in range(world)]
        imbalance, step = balance(plain_costs, in_turn)
        result |= {f"ffd_imbalance_{world}": imbalance, f"ffd_step_{world}": step}
    return result


def balance(costs: Sequence[float], dealt: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the cost of the busiest rank, and of a step in which ranks wait at every row, over the mean cost."""
    places = max(map(len, dealt))
    shares = np.zeros((len(dealt), places))
    for rank, rows in enumerate(dealt):
        for place, row in enumerate(rows):
            shares[rank, place] = 0.0 if row == PADDING_ROW else costs[row]
    mean = shares.sum() / len(dealt)
    return float(shares.sum(axis=1).max() / mean), float(shares.max(axis=0).sum() / mean)


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items, the longest first, each into the first row with enough space."""
    rows: list[list[int]] = []
    free: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, room in enumerate(free) if room >= lengths[item]), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(capacity)
        rows[row].append(item)
        free[row] -= lengths[item]
    return rows


def fewest_rows(lengths: Sequence[int], capacity: int) -> int:
    """Return a lower bound on the rows: the larger of bound L2 (Martello and Toth 1990) and, for items of equal length,
    the dual feasible functions u(k) (Fekete and Schepers 2001).

    L2: for any k up to half a row, items longer than `capacity - k` need a row alone, items longer than half a row need
    one each, and items from k to half a row need the space that the latter do not leave. u(k): in a row of `capacity`,
    the sum of floor((k + 1) length / capacity) is at most k, unless it is exactly full.
    """
    sizes = np.sort(np.array(lengths))
    ends = np.cumsum(np.concatenate([[0], sizes]))
    middle = np.searchsorted(sizes, capacity // 2, side="right")
    best = -(-int(ends[-1]) // capacity)
    for k in {0, *(size for size in lengths if 2 * size <= capacity)}:
        alone = np.searchsorted(sizes, capacity - k, side="right")
        small = np.searchsorted(sizes, k, side="left")
        large = len(sizes) - middle
        left = capacity * (alone - middle) - (ends[alone] - ends[middle])
        best = max(best, int(large) + max(0, -(-int(ends[middle] - ends[small] - left) // capacity)))
    for k in range(1, 20):
        shares, rest = np.divmod((k + 1) * sizes, capacity)
        best = max(best, int(np.ceil(np.where(rest == 0, sizes / capacity, shares / k).sum() - 1e-9)))
    return best


def print_tables(records: Sequence[dict[str, Any]]) -> None:
    print("| lengths | samples | row | bins / bound | FFD | rows | CPU ms |\n|---|---|---|---|---|---|---|")
    for record in records:
        cells = (
            record["distribution"], f"{record['samples']:.0f}", f"{record['row_length']}",
            f"{record['bins_over_bound']:.3f}", f"{record['ffd_bins_over_bound']:.3f}",
            f"{record['bins']:.0f} → {record['rows']:.0f}", f"{record['cpu_ms']:.1f}",
        )  # fmt: skip
        print(f"| {' | '.join(cells)} |")
    several = WORLDS[1:]
    heads = [f"{what}, {world} ranks" for what in ("imbalance", "step") for world in several]
    print("\nOurs / first-fit-decreasing dealt in turn\n")
    print(f"| lengths | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for record in records:
        pairs = [(f"{what}_{world}", f"ffd_{what}_{world}") for what in ("imbalance", "step") for world in several]
        cells = [f"{record[ours]:.3f} / {record[theirs]:.3f}" for ours, theirs in pairs]
        print(f"| {record['distribution']} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
