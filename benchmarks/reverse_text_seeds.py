"""Reward of the CPU recipe at every async level and with several seeds, with the real system.

    uv run --extra cpu python benchmarks/reverse_text_seeds.py --json benchmarks/results/reverse_text_seeds.json

Runs one after the other, two to three minutes each on two cores. Prints a Markdown table; `--json FILE` writes the
figures and curves. The exit code is 1 if a run misses a limit. Arguments after `--` are passed to every `rl`:
`... -- --trainer.optim.lr 3e-4`.

Rewards are those of the training batches, sampled at temperature 1. The last column is greedy decoding of held-out
words, which does not improve if the policy only becomes more confident.

Learning curves of a window of W batches (docs/design/scheduling.md), with words that are repeated every 4 batches, so
that the history knows how long they take. Run it with W = 1 and W = 8:

    ... --async-levels 2 --json window_8.json -- --orchestrator.length-aware-admission 8 \\
        --orchestrator.env.args '{"words": 512, "min_letters": 1, "max_letters": 4}'
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from prime_rl.storage.paths import RunPaths

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "configs/reverse_text/cpu.toml"

# Limits of the README: mean reward of the first 3 and of the last 5 steps.
FIRST, FIRST_LIMIT = 3, 0.60
LAST, LAST_LIMIT = 5, 0.95
SECONDS_LIMIT = 240

CURVES = {
    "reward": "reward/mean",
    "exact_match": "metrics/exact_match",
    "letter_overlap": "metrics/letter_overlap",
    "length_match": "metrics/length_match",
    "staleness": "staleness/max",
}

HEADER = (
    "| k | seed | reward, first 3 → last 5 | exact match | right length | staleness max | seconds | "
    "greedy: reward, exact match |\n|---|---|---|---|---|---|---|---|"
)

# Held-out words for greedy decoding: the environment's evaluation words.
GREEDY_WORDS, MIN_LETTERS, MAX_LETTERS = 1000, 3, 4


def main() -> int:
    arguments = parse_arguments()
    results: list[dict[str, Any]] = []
    start = greedy(ROOT / "configs/reverse_text/model")
    print(f"warm start, greedy: {greedy_cell(start)}\n\n{HEADER}", flush=True)
    for k in arguments.async_levels:
        for seed in arguments.seeds:
            directory = arguments.output_dir.resolve() / f"k{k}_seed{seed}"
            result = measure(k, seed, directory, arguments.overrides)
            results.append(result)
            print(table_row(result), flush=True)
            if arguments.json:
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(report(start, results) + "\n")
    missed = [f"k={r['async_level']} seed={r['seed']}: {what}" for r in results for what in missed_limits(r)]
    for line in missed:
        print(f"missed: {line}")
    print(f"{len(results)} runs, limits {limits()}: {'missed' if missed else 'all kept'}")
    return 1 if missed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--async-levels", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="write all figures and curves to this file")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("outputs/reverse_text_seeds"), help="directory of the runs"
    )
    parser.add_argument("overrides", nargs="*", help="further arguments of rl, after --")
    return parser.parse_args()


def measure(k: int, seed: int, directory: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run `rl` once in `directory` and return its figures."""
    shutil.rmtree(directory, ignore_errors=True)
    settings = ["--async-level", str(k), "--seed", str(seed), "--output-dir", str(directory)]
    command = [str(Path(sys.executable).with_name("rl")), "@", str(RECIPE), *settings, *overrides]
    log = directory.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("w") as file:
        subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=True)
    seconds = time.monotonic() - start
    return {"async_level": k, "seed": seed, "seconds": seconds, **read_run(RunPaths(directory))}


def read_run(paths: RunPaths) -> dict[str, Any]:
    """Return the figures of a finished run."""
    steps = [json.loads(line) for line in paths.metrics("orchestrator").read_text().splitlines()]
    return {**summarise(steps), "greedy": greedy(paths.weights(len(steps)))}


def greedy(model_dir: Path) -> dict[str, float]:
    """Decode held-out words greedily with the model in `model_dir`; return the mean reward and exact match."""
    from reverse_text import scores
    from reverse_text.words import make_words
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    words = list(islice(make_words("eval 0", MIN_LETTERS, MAX_LETTERS), GREEDY_WORDS))
    pairs: list[tuple[str, str]] = []
    for length in range(MIN_LETTERS, MAX_LETTERS + 1):  # equal lengths need no padding
        same = [word for word in words if len(word) == length]
        chats = [[{"role": "user", "content": word}] for word in same]
        prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_tensors="pt")
        ids = prompts["input_ids"]
        answers = model.generate(**prompts, do_sample=False, max_new_tokens=MAX_LETTERS + 3)[:, ids.shape[1] :]
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        pairs += [(word[::-1], text) for word, text in zip(same, texts, strict=True)]
    return {f.__name__: mean([f(*pair) for pair in pairs]) for f in (scores.lcs_ratio, scores.exact_match)}


def summarise(steps: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the figures of the table and the curves from the orchestrator's metrics, one object per step."""
    curves = {name: [round(step[key], 4) for step in steps] for name, key in CURVES.items()}
    ends = {
        name: {"first": mean(curve[:FIRST]), "last": mean(curve[-LAST:])}
        for name, curve in curves.items()
        if name != "staleness"
    }
    return {"steps": len(steps), **ends, "staleness_max": max(curves["staleness"]), "curves": curves}


def missed_limits(result: dict[str, Any]) -> list[str]:
    """Return the limits that a run missed."""
    reward = result["reward"]
    checks = {
        f"first {FIRST} steps {reward['first']:.3f}": reward["first"] <= FIRST_LIMIT,
        f"last {LAST} steps {reward['last']:.3f}": reward["last"] >= LAST_LIMIT,
        f"staleness {result['staleness_max']:.0f}": result["staleness_max"] <= result["async_level"],
        f"{result['seconds']:.0f} seconds": result["seconds"] <= SECONDS_LIMIT,
    }
    return [what for what, kept in checks.items() if not kept]


def report(start: dict[str, float], results: Sequence[dict[str, Any]]) -> str:
    """Return the JSON of all figures; the curves have one value per step."""
    return json.dumps({"limits": limits(), "warm_start_greedy": start, "runs": results}, indent=1)


def limits() -> dict[str, float]:
    """Return the limits by name."""
    return {"reward_first_3": FIRST_LIMIT, "reward_last_5": LAST_LIMIT, "seconds": SECONDS_LIMIT}


def table_row(result: dict[str, Any]) -> str:
    """Format one run as a row of the table."""

    def rise(name: str) -> str:
        return f"{result[name]['first']:.3f} → {result[name]['last']:.3f}"

    cells = [result["async_level"], result["seed"], *map(rise, ("reward", "exact_match", "length_match"))]
    cells += [f"{result['staleness_max']:.0f}", f"{result['seconds']:.0f}", greedy_cell(result["greedy"])]
    return "| " + " | ".join(map(str, cells)) + " |"


def greedy_cell(figures: dict[str, float]) -> str:
    """Format the figures of greedy decoding."""
    return f"{figures['lcs_ratio']:.3f}, {figures['exact_match']:.3f}"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
