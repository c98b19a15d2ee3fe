"""Names a rank of the trainer for which the others wait, from the lines of metrics/trainer.jsonl.

It sees waits outside FSDP's collectives: for rows, files and the gradient sum. With sharded parameters the other ranks
wait inside the forward and backward passes, which is not measured.
"""

from collections.abc import Iterable, Mapping
from statistics import mean
from typing import Any

SLOW_RANK = 1.2
"""A rank is slow if its `time/busy` is so many times that of the median rank."""
NUM_STEPS = 10
"""Consecutive steps with the same slow rank that cause a hint."""


def find_slow_rank(rows: Iterable[Mapping[str, Any]], hosts: Mapping[str, str]) -> str | None:
    """Return a hint if the same rank is slow in each of the last `NUM_STEPS` steps.

    Args:
        rows: lines of the trainer's metrics in order; lines of validations are ignored.
        hosts: by the name of a trainer's heartbeat, `trainer_<rank>`.
    """
    steps = [row for row in rows if "rank/slowest" in row][-NUM_STEPS:]
    ranks = {row["rank/slowest"] for row in steps}
    factors = [row["rank/slowdown"] or 0.0 for row in steps]
    if len(steps) < NUM_STEPS or len(ranks) > 1 or min(factors) < SLOW_RANK:
        return None
    (rank,) = ranks
    host = hosts.get(f"trainer_{rank}")
    where = f" on {host}" if host else ""
    return (
        f"trainer rank {rank}{where} is slow: in each of the last {NUM_STEPS} steps it was busy the longest, "
        f"{mean(factors):.1f} times as long as the median rank, and the others waited; compare clocks, temperature and "
        "other processes of that machine with the rest"
    )
