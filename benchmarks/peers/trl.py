"""prime-rl next to TRL's GRPOTrainer: the same job, one after the other, on the same machine.

    uv run --extra cpu python -P benchmarks/peers/trl.py --json benchmarks/results/trl_short.json
    uv run --extra cpu python -P benchmarks/peers/trl.py --recipe long --json benchmarks/results/trl_long.json

`short` is configs/reverse_text/cpu.toml: 60 batches of 1,024 completions of at most 8 tokens. `long` is
long/recipe.toml: 20 batches of 256 completions of 64 to 256 tokens. Both systems take the same model, prompts, rewards,
batch, number of minibatches, rate and warm-up, and their own losses. TRL samples by itself, without vLLM, and
synchronously, as it does by default; it gets an environment of its own with pinned versions (`--venv`), made at the
first call.

All seconds count from the start of the command, imports and server start included. `to_090` is the time of the first
batch with a mean reward of at least 0.90, null if there is none. `--json FILE` also gets both reward curves.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PACKAGES = ("trl==1.16.0", "torch==2.13.0", "transformers==5.16.1")
RECIPES = {"short": ROOT / "configs/reverse_text/cpu.toml", "long": HERE / "long/recipe.toml"}
REWARD = 0.90
Curve = list[tuple[float, float]]  # seconds since the start of the command, mean reward


def main() -> int:
    """Run both, print and write the figures."""
    arguments = parse_arguments()
    output = arguments.output_dir.resolve()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    python = make_venv(arguments.venv.resolve())
    recipe = RECIPES[arguments.recipe]
    paths = os.pathsep.join((str(HERE / "long"), str(ROOT / "environments/reverse_text")))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    rl = [sys.executable, "-m", "prime_rl.entrypoints.rl", "@", str(recipe), "--output-dir", str(output / "ours")]
    ours_seconds, ours = run(
        rl, environment, output / "ours.log", output / "ours/metrics/orchestrator.jsonl", "reward/mean"
    )
    command = [str(python), str(HERE / "trl_trainer.py"), *peer_arguments(arguments.recipe, recipe, output)]
    peer_seconds, peer = run(command, environment, output / "peer.log", output / "peer.jsonl", "reward")

    figures: dict[str, Any] = {
        "ours_seconds": round(ours_seconds, 1),
        "peer_seconds": round(peer_seconds, 1),
        "ours_to_090_seconds": seconds_to(ours, REWARD),
        "peer_to_090_seconds": seconds_to(peer, REWARD),
    }
    for name, value in figures.items():
        print(f"{name:22} {value}")
    print(f"rewards: ours {ours[0][1]:.3f} -> {ours[-1][1]:.3f}, peer {peer[0][1]:.3f} -> {peer[-1][1]:.3f}")
    if arguments.json:
        record = {
            **figures,
            "recipe": arguments.recipe,
            "peer": PACKAGES,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": f"{os.cpu_count()} cores{', ' + arguments.note if arguments.note else ''}",
            "ours": ours,
            "peer_curve": peer,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record) + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="short")
    parser.add_argument("--json", type=Path, help="write the figures and both curves to this file")
    parser.add_argument("--venv", type=Path, default=ROOT / "outputs/peers/trl_venv", help="environment of TRL")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "outputs/peers/trl", help="deleted first")
    parser.add_argument("--note", default="", help="what else the machine did, for the JSON file")
    return parser.parse_args()


def make_venv(path: Path) -> Path:
    """Return the interpreter of TRL's environment, which is made if it does not exist."""
    python = path / "bin/python"
    if not python.exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        subprocess.run(["uv", "venv", "--quiet", "--python", version, str(path)], check=True)
        install = ["uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python), *PACKAGES]
        subprocess.run(install, check=True)
    return python


def peer_arguments(name: str, recipe: Path, output: Path) -> list[str]:
    """Return the arguments of trl_trainer.py for a recipe."""
    config = tomllib.loads(recipe.read_text())
    orchestrator, trainer = config["orchestrator"], config["trainer"]
    values = {
        "model": ROOT / config["model"]["name"],
        "log": output / "peer.jsonl",
        "output-dir": output / "peer",
        "recipe": name,
        "batches": config["max_steps"],
        "batch-size": orchestrator["batch_size"],
        "min-tokens": orchestrator["sampling"].get("min_tokens", 0),
        "max-tokens": orchestrator["sampling"]["max_tokens"],
        "learning-rate": trainer["optim"]["lr"],
        "warmup": trainer["scheduler"]["warmup_steps"],
    }
    return [part for key, value in values.items() for part in (f"--{key}", str(value))]


def run(command: list[str], environment: dict[str, str], log: Path, metrics: Path, key: str) -> tuple[float, Curve]:
    """Run a command to its end; return its seconds and its curve.

    Raises:
        SystemExit: the command failed.
    """
    start, start_clock = time.time(), time.monotonic()
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    seconds = time.monotonic() - start_clock
    if done.returncode:
        sys.exit(f"{command[0]} exited with {done.returncode}; see {log}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return seconds, [(round(line["time"] - start, 1), line[key]) for line in lines if key in line]


def seconds_to(curve: Curve, reward: float) -> float | None:
    """Return the time of the first batch with at least this mean reward, None if there is none."""
    return next((seconds for seconds, value in curve if value >= reward), None)


if __name__ == "__main__":
    sys.exit(main())
