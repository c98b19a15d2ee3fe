"""Writes a run directory with made-up contents, of any size, for benchmarks and tests of the page.

uv run python benchmarks/synthetic_run.py DIRECTORY --steps 10000 --rollouts 100000
"""

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from prime_rl.storage.paths import RunPaths

START = 1_800_000_000.0
STEP_SECONDS = 6.0
NUM_EXTRA_METRICS = 22
"""With the named ones, 50 metrics of both processes."""
GROUP_SIZE = 8
PROMPT, COMPLETION = 12, 20
"""Tokens of each made-up rollout."""
ENVS = ("math", "code")
WORDS = [
    "the",
    "model",
    "adds",
    "both",
    "numbers",
    "and",
    "checks",
    "whether",
    "the",
    "answer",
    "is",
    "right",
    "before",
    "it",
    "ends",
]


def write_run(root: Path, steps: int, groups_per_step: int = 2, *, num_token_steps: int = 2, seed: int = 0) -> RunPaths:
    """Write `steps` steps; the newest `num_token_steps` have rows and the trainer's values per token."""
    paths, rng = RunPaths(root), random.Random(seed)
    for folder in (paths.metrics_dir, paths.samples_dir, paths.timeline_dir):
        folder.mkdir(parents=True, exist_ok=True)
    paths.run_toml.write_text(f"max_steps = {steps + steps // 4}\nasync_level = 2\n\n[trainer.optim]\nlr = 1e-5\n")
    events = [
        {"time": START - 20, "event": "started", "name": name} for name in ("inference", "orchestrator", "trainer_0")
    ]
    events.append(
        {"time": START + STEP_SECONDS * steps / 2, "event": "restarted", "name": "inference", "detail": "killed"}
    )
    events.append({"time": START + STEP_SECONDS * steps + 1, "event": "finished", "name": "rl"})
    paths.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    _write_metrics(paths, steps, rng)
    _write_timeline(paths, steps)
    for step in range(steps):
        rows = sample_rows(step, groups_per_step, _progress(step, steps), rng)
        paths.samples(step).write_text("".join(json.dumps(row) + "\n" for row in rows))
        if step >= steps - num_token_steps:
            write_tokens(paths, step, rows)
    return paths


def metric_rows(step: int, progress: float, rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """One line of the orchestrator, and one of the trainer."""
    reward, end = 0.2 + 0.7 * progress + rng.gauss(0, 0.02), START + STEP_SECONDS * (step + 1)
    orchestrator = {
        "step": step, "time": end - 2, "reward/mean": reward, "reward/std": 0.3, "reward/sampled/mean": reward,
        "reward/math/mean": reward + 0.05, "reward/code/mean": reward - 0.05, "staleness/mean": 1 + rng.random() / 2,
        "staleness/max": 2, "completion_len/mean": 400 - 200 * progress, "is_truncated/mean": 0.2 * (1 - progress),
        "batch/zero_advantage_groups": 0.3 * progress, "time/step": STEP_SECONDS, "time/weight_update": 0.4,
        "time/wait_for_policy": 0.4 + 0.3 * rng.random(), "perf/tokens_per_second": 5000 + rng.gauss(0, 200),
        "tokens/sampled": 30_000 * (step + 1), "policy/version": max(0, step - 1),
    }  # fmt: skip
    trainer = {
        "step": step, "time": end, "loss": rng.gauss(0, 0.01), "grad_norm": 0.3 + abs(rng.gauss(0, 0.05)),
        "entropy": 1.5 - progress, "mismatch_kl": abs(rng.gauss(1e-3, 2e-4)), "lr": 1e-5, "tokens": 32_000,
        "time/step": STEP_SECONDS, "time/wait_for_batch": 0.8 + 0.6 * rng.random(), "time/train": 4.6,
        "perf/tokens_per_second": 7000 + rng.gauss(0, 100), "perf/mfu": 0.36 + rng.gauss(0, 0.01),
        "importance_ratio/clipped": abs(rng.gauss(0.01, 0.003)),
    }  # fmt: skip
    orchestrator |= {f"metrics/quality_{i}": rng.random() for i in range(NUM_EXTRA_METRICS)}
    return orchestrator, trainer


def sample_rows(step: int, num_groups: int, progress: float, rng: random.Random) -> list[dict[str, Any]]:
    """The lines of one sample file."""
    rows = []
    for group in range(num_groups):
        rewards = [float(rng.random() < 0.2 + 0.7 * progress) for _ in range(GROUP_SIZE)]
        mean, group_id = sum(rewards) / GROUP_SIZE, step * num_groups + group
        for index, reward in enumerate(rewards):
            a, b = rng.randrange(100), rng.randrange(100)
            text = " ".join(rng.choice(WORDS) for _ in range(6))
            messages = [
                {"role": "user", "content": f"What is {a} + {b}?"},
                {"role": "assistant", "content": f"{text}: {a + b}"},
            ]
            rows.append(
                {
                    "group_id": group_id, "rollout": index, "env": ENVS[group % len(ENVS)], "reward": reward,
                    "advantage": reward - mean, "metrics": {"exact_match": reward}, "weights": {"exact_match": 1.0},
                    "example": group_id % 16, "is_truncated": rng.random() < 0.05,
                    "min_version": max(0, step - 2), "max_version": max(0, step - 1), "messages": messages,
                }
            )  # fmt: skip
    return rows


def write_tokens(paths: RunPaths, step: int, rows: list[dict[str, Any]]) -> None:
    """Write rows.safetensors and train.safetensors of a step: one sample per rollout, one row per sample."""
    length, count = PROMPT + COMPLETION, len(rows)
    rng, total = np.random.default_rng(step), length * count
    mask = np.tile(np.arange(length) >= PROMPT, count)
    logprobs = np.where(mask, -rng.exponential(0.5, total), 0).astype(np.float32)
    advantages = np.repeat([row["advantage"] for row in rows], length) * mask
    folder = paths.rollouts(step)
    folder.mkdir(parents=True, exist_ok=True)
    batch = {
        "tokens": rng.integers(0, 1000, total, dtype=np.int32), "loss_mask": mask.astype(np.uint8),
        "logprobs": logprobs,
        "advantages": advantages.astype(np.float32), "versions": np.where(mask, max(0, step - 1), -1).astype(np.int32),
        "seq_lens": np.full(count, length, np.int32), "row_offsets": np.arange(count + 1, dtype=np.int64) * length,
        "sample_group": np.array([row["group_id"] for row in rows], np.int64),
        "sample_rollout": np.array([row["rollout"] for row in rows], np.int32),
    }  # fmt: skip
    difference = np.where(mask, rng.normal(0, 0.3, total), 0).astype(np.float32)
    trained = {
        "logprobs": logprobs + difference, "ratio": np.exp(difference), "clipped": (difference > 0.7).astype(np.uint8),
        "masked": np.zeros(total, np.uint8),
        "entropy": np.where(mask, rng.exponential(0.8, total), 0).astype(np.float32),
    }  # fmt: skip
    save_file(batch, folder / "rows.safetensors")
    save_file(trained, folder / "train.safetensors")


def _write_metrics(paths: RunPaths, steps: int, rng: random.Random) -> None:
    with paths.metrics("orchestrator").open("w") as shipped, paths.metrics("trainer").open("w") as trained:
        for step in range(steps):
            orchestrator, trainer = metric_rows(step, _progress(step, steps), rng)
            shipped.write(json.dumps(orchestrator) + "\n")
            trained.write(json.dumps(trainer) + "\n")
            if step % 50 == 0:
                reward = 0.15 + 0.7 * _progress(step, steps)
                values = {"eval/math/reward/mean": reward, "eval/math/pass@4": min(1, 1.3 * reward)}
                shipped.write(json.dumps({"step": step, "time": START + STEP_SECONDS * step, **values}) + "\n")


def _write_timeline(paths: RunPaths, steps: int) -> None:
    names = ("trainer_0", "orchestrator", "inference", "inference_updates")
    lanes: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for step in range(steps):
        begin = START + STEP_SECONDS * step
        _add(lanes["trainer_0"], f"wait for batch {step}", begin, 1.0, "orchestrator", step)
        _add(lanes["trainer_0"], f"train step {step}", begin + 1, 4.6, None, step)
        _add(lanes["trainer_0"], f"publish version {step + 1}", begin + 5.6, 0.4, None, step)
        _add(lanes["orchestrator"], "sample", begin, 5.2, "inference", step)
        _add(lanes["orchestrator"], f"ship batch {step}", begin + 5.2, 0.3, None, step)
        _add(lanes["orchestrator"], "switch inference", begin + 5.5, 0.5, "inference", step)
        _add(lanes["inference"], "serve", begin, 5.75, None, None, step)
        _add(lanes["inference"], "pause", begin + 5.75, 0.25, None, None, step + 1)
        _add(lanes["inference_updates"], "stage", begin + 5.2, 0.5, None, None, step + 1)
        _add(lanes["inference_updates"], "swap", begin + 5.8, 0.15, None, None, step + 1)
    for name, spans in lanes.items():
        paths.timeline(name).write_text("".join(json.dumps(span) + "\n" for span in spans))


def _add(
    lane: list[dict[str, Any]],
    name: str,
    start: float,
    seconds: float,
    waiting_for: str | None,
    step: int | None,
    version: int | None = None,
) -> None:
    span = {"name": name, "start": start, "end": start + seconds, "waiting_for": waiting_for}
    lane.append({**span, "step": step, "version": version})


def _progress(step: int, steps: int) -> float:
    return 1 - math.exp(-3 * step / max(1, steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rollouts", type=int, default=3200)
    arguments = parser.parse_args()
    groups = max(1, math.ceil(arguments.rollouts / arguments.steps / GROUP_SIZE))
    write_run(arguments.directory, arguments.steps, groups)


if __name__ == "__main__":
    main()
