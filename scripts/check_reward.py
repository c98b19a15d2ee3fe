"""Check that the reward of a run has risen: the mean over the rollouts of its last ten batches is at least a value.

    uv run python scripts/check_reward.py outputs --at-least 0.9

Exit code 0 if it is, 1 if it is not, 2 if the directory has no rewards.
"""

import argparse
import sys
from pathlib import Path
from statistics import fmean

from prime_rl.core.json_lines import JsonLinesFile
from prime_rl.storage.paths import RunPaths

_NUM_BATCHES = 10
"""One batch may be in a short fall, from which the policy recovers."""


def main() -> int:
    """Print the first and the last reward and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the output_dir of a run")
    parser.add_argument("--at-least", type=float, required=True, help="the reward that the last ten batches must have")
    arguments = parser.parse_args()
    file, rewards = JsonLinesFile(RunPaths(arguments.run).metrics("orchestrator")), list[float]()
    while rows := file.read():
        rewards += [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    if not rewards:
        print(f"error: {file.path} has no values of reward/mean; pass the output_dir of a run", file=sys.stderr)
        return 2
    last = fmean(rewards[-_NUM_BATCHES:])
    comparison = "at least" if last >= arguments.at_least else "below"
    print(f"reward {rewards[0]:.3f} -> {last:.3f} in {len(rewards)} steps: {comparison} {arguments.at_least}")
    return 0 if last >= arguments.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
