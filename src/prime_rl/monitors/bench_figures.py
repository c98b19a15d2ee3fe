"""The figures of a benchmark: metrics/*.jsonl without the first step."""

import json

import numpy as np

from prime_rl.configs.shared.bench import WARMUP_STEPS
from prime_rl.storage.paths import RunPaths

_METRICS = {
    "trainer": "time/step time/wait_for_batch time/load_data time/train time/publish tokens perf/tokens_per_second "
    "perf/mfu perf/mfu_simple perf/peak_memory_gib",
    "orchestrator": "time/step perf/rollouts_per_second perf/tokens_per_second completion_len/mean seq_len/mean "
    "event_loop_lag/p99",
}


def benchmark_figures(paths: RunPaths, role: str) -> dict[str, dict[str, float]]:
    """Return the `mean`, `min` and `max` of each metric of `role` over the measured steps."""
    lines = [json.loads(line) for line in paths.metrics(role).read_text().splitlines()]
    steps = [line for line in lines if line["step"] >= WARMUP_STEPS]
    figures = {}
    for name in _METRICS[role].split():
        values = [step[name] for step in steps if step.get(name) is not None]
        if values:
            figures[name] = {"mean": float(np.mean(values)), "min": min(values), "max": max(values)}
    return figures
