"""Cost of several LoRA runs in one trainer: throughput, memory of a further run, and the pause when a run joins.

    uv run --extra cpu python benchmarks/multi_run.py --json benchmarks/results/multi_run.json

Real trainers on a CPU with recorded batches: a 20M-parameter model. No inference; about four minutes on two cores.

one, four    tokens per second of one run with the whole batch, and of four runs with a quarter each; `ratio` (>= 0.9)
memory       growth of the trainer's peak resident set per further run of rank 128, MB; `adapter` is 16 bytes per
             parameter of an adapter (weights, gradients and two moments in float32). The allocator returns freed memory
             to the system at once; by default it keeps a part for later.
pause        longest time between two iterations of a run while another joins, seconds (limit 1)
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
from transformers import Qwen3Config, Qwen3ForCausalLM

from prime_rl.configs.loading.base_config import write_config
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.trainer import FakeDataConfig
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.batch import write_batch
from prime_rl.storage.paths import RunPaths
from prime_rl.trainer.rl.batch_source import fake_batch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.tiny_model import make_tiny_model

SEQ_LEN, BATCH, STEPS = 512, 32, 4
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model")
        one = train(Path(scratch) / "one", model, 1, BATCH)
        four = train(Path(scratch) / "four", model, 4, BATCH // 4)
        alone, company = (
            train(Path(scratch) / f"memory_{runs}", model, runs, BATCH // 4, rank=128, **RETURN_MEMORY)
            for runs in (1, 4)
        )
        adapter = 4 * (Path(scratch) / "memory_1/run_0/weights/step_1/adapter_model.safetensors").stat().st_size / 1e6
    report = {
        "tokens_per_second_one": one["rate"],
        "tokens_per_second_four": four["rate"],
        "ratio": four["rate"] / one["rate"],
        "memory_per_run_mb": (company["memory"] - alone["memory"]) / 3,
        "adapter_mb": adapter,
        "longest_pause_s": four["pause"],
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }
    print(json.dumps(report, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def make_model(path: Path) -> Path:
    """Write a random model, with a tokenizer of its own."""
    make_tiny_model(path)
    shape = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 8, "layer_types": None}
    config = Qwen3Config(**{**Qwen3Config.from_pretrained(path).to_diff_dict(), **shape})
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def train(root: Path, model: Path, runs: int, batch_size: int, rank: int = 16, **environment: str) -> dict[str, float]:
    """Train `runs` runs of `batch_size` rollouts a step; run 0 begins two steps before the others join."""
    with ExitStack() as stack:
        paths = [RunPaths(root / f"run_{index}") for index in range(runs)]
        for index, run in enumerate(paths):
            ship(run, batch_size, index, STEPS + 2 * (index == 0))
            stack.enter_context(HeartbeatWriter(run, "orchestrator", "orchestrator"))
        announce(paths[0], model, STEPS + 2)
        command = [
            sys.executable,
            "-m",
            "prime_rl.entrypoints.trainer",
            "--device",
            "cpu",
            "--max-concurrent-runs",
            "4",
        ]
        command += ["--model.name", str(model), "--model.seq-len", str(SEQ_LEN), "--output-dir", str(root)]
        command += ["--model.lora", "--model.lora.rank", str(rank), "--exit-when-idle-seconds", "3"]
        trainer = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, **environment})
        while not paths[0].weights(2).exists():
            time.sleep(0.05)
        for run in paths[1:]:
            announce(run, model, STEPS)
        process, memory = psutil.Process(trainer.pid), 0
        while trainer.poll() is None:
            memory = max(memory, process.memory_info().rss) if process.is_running() else memory
            time.sleep(0.05)
    assert trainer.returncode == 0, f"the trainer failed; see {root}/logs"
    lines = [json.loads(line) for line in RunPaths(root).metrics("trainer").read_text().splitlines()]
    full = [line for line in lines if line["runs/active"] == runs and line["step"] > 0]
    pauses = [b["time"] - a["time"] - b["time/step"] for a, b in itertools.pairwise(lines)]
    seconds = full[-1]["time"] - full[0]["time"]
    return {
        "rate": sum(line["tokens"] for line in full[1:]) / seconds,
        "memory": memory / 1e6,
        "pause": max(pauses),
    }


def ship(paths: RunPaths, batch_size: int, seed: int, steps: int) -> None:
    """Write the batches of a run."""
    config = FakeDataConfig(batch_size=batch_size, seq_len=SEQ_LEN, micro_batch_size=8, variable_length=True)
    for step in range(steps):
        batch = fake_batch(config, 100, SEQ_LEN, seed, step)
        write_batch(paths.rollouts(step), batch, {"branch": 0, "step": step, "async_level": 2})


def announce(paths: RunPaths, model: Path, steps: int) -> None:
    """Write the configuration of the run's orchestrator."""
    config = OrchestratorConfig(
        model={"name": str(model)}, output_dir=paths.root, seq_len=SEQ_LEN, max_steps=steps, optim={"lr": 1e-4}
    )
    write_config(config, paths.config("orchestrator"))


if __name__ == "__main__":
    main()
