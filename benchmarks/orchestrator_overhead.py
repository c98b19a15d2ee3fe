"""CPU time of a rollout from its dispatch to the written batch, with a model of no cost.

    uv run python benchmarks/orchestrator_overhead.py --json benchmarks/results/orchestrator_overhead.json

The real orchestrator with environment workers, ledger, batches and metrics runs against a server in another process
with canned responses of vLLM. The baseline runs the same rollouts with verifiers' OpenAI client in one process, up to
the written batch. No model and no GPU; a few minutes on two cores. Two shapes of single-turn rollouts in groups of 8:
`short` (32 prompt tokens, 64 sampled) and `long` (1,000 and 2,000), with log-probabilities.

main        CPU milliseconds per rollout of the orchestrator's process (limit 1 for short, 2 for long)
total       the same with the environment workers
verifiers   CPU milliseconds per rollout with verifiers' client
share       total over verifiers (limit a third)
in flight   concurrent rollouts, 90th percentile over the run; at most 1,000
lag         event loop lag of the orchestrator, 99th percentile, median over batches

The first two batches are not measured. `--json FILE` writes {cpu_ms_main, cpu_ms_total, verifiers_cpu_ms,
loop_lag_p99_ms} of the long rollouts, and the same of the short ones with the prefix `short_`.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
GROUP = 8
WARM_UP = 2
KEY = "OVERHEAD_API_KEY"


@dataclass(frozen=True)
class Shape:
    """Tokens of a rollout, rollouts of a batch and number of batches."""

    prompt: int
    completion: int
    batch: int = 384
    steps: int = 8
    verifiers_groups: int = 40


SHAPES = {"short": Shape(32, 64, steps=12), "long": Shape(1000, 2000), "tiny": Shape(8, 8, 16, 4, 2)}
MEASURED = ("short", "long")


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


class Meter:
    """Replaces the monitor: reads the clocks after each batch."""

    def __init__(self, children: list[psutil.Process], shape: Shape) -> None:
        self._children, self._shape = children, shape
        self._lags: list[float] = []
        self._start = (0.0, 0.0)
        self.result: dict[str, float] = {}

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Read the clocks."""
        self._lags.append(metrics.get("event_loop_lag/p99") or 0.0)
        now = (time.process_time(), sum(cpu_seconds(child) for child in self._children))
        if step == WARM_UP - 1:
            self._start = now
        if step == self._shape.steps - 1:
            rollouts = self._shape.batch * (self._shape.steps - WARM_UP)
            main, workers = (1000 * (after - before) / rollouts for before, after in zip(self._start, now, strict=True))
            self.result = {
                "cpu_ms_main": main,
                "cpu_ms_total": main + workers,
                "loop_lag_p99_ms": 1000 * float(np.median(self._lags[WARM_UP:])),
            }

    def log_samples(self, *_: Any) -> None:
        """Do nothing."""

    def log_distributions(self, *_: Any) -> None:
        """Do nothing."""


async def run_ours(directory: Path, url: str, shape: Shape) -> dict[str, float]:
    """Run the orchestrator against the engine at `url`."""
    from prime_rl.configs.client import ClientConfig
    from prime_rl.configs.environment import EnvConfig
    from prime_rl.configs.orchestrator import OrchestratorConfig, OrchestratorModelConfig
    from prime_rl.configs.sampling import SamplingConfig
    from prime_rl.orchestrator.orchestrator import OrchestratorLoop
    from prime_rl.orchestrator.orchestrator_setup import connect, model_access, start_environments
    from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher

    run = directory / f"run_{shape.completion}"
    config = OrchestratorConfig(
        model=OrchestratorModelConfig(name=str(directory / "tokenizer")),
        client=ClientConfig(base_url=[url]),
        env=[EnvConfig(id="overhead_environment", args={"prompts": str(directory / f"{shape.prompt}.json")})],
        batch_size=shape.batch,
        rollouts_per_example=GROUP,
        seq_len=shape.prompt + shape.completion + 100,
        sampling=SamplingConfig(max_tokens=shape.completion),
        async_level=2,
        max_concurrent=1000,
        max_steps=shape.steps,
        output_dir=run,
        run_id="overhead",
    )
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.post(f"{url}/train", json={"run": str(run), "steps": shape.steps})
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(WorkerLauncher())
        environments = await start_environments(config, host, model_access(config), stack)
        children = psutil.Process().children(recursive=True)
        meter = Meter(children, shape)
        servers = [await connect(config, url, stack)]
        in_flight: list[int] = []
        watch = asyncio.create_task(look(servers[0], in_flight))
        await OrchestratorLoop(config, environments, servers, meter).run()  # type: ignore[arg-type]
        watch.cancel()
    return meter.result | {"in_flight": float(np.percentile(in_flight, 90))}


async def look(server: Any, in_flight: list[int]) -> None:
    while True:
        in_flight.append(server.in_flight)
        await asyncio.sleep(0.05)


async def run_verifiers(directory: Path, url: str, shape: Shape) -> dict[str, float]:
    """Run and write the same rollouts with verifiers' client, 32 groups at a time, in this process."""
    import verifiers as vf
    from verifiers.types import ClientConfig

    from prime_rl.core.types import Group, Rollout, Sample
    from prime_rl.orchestrator.packing import pack
    from prime_rl.storage.batch import write_batch

    env = vf.load_environment("overhead_environment", prompts=str(directory / f"{shape.prompt}.json"))
    rows = env.get_dataset()
    os.environ[KEY] = "none"
    client = ClientConfig(api_key_var=KEY, api_base_url=f"{url}/v1", max_retries=0)
    sampling = {"max_tokens": shape.completion, "logprobs": True, "extra_body": {"return_token_ids": True}}
    resolved = vf.clients.resolve_client(client)

    def sample(step: Mapping[str, Any]) -> Sample:
        tokens = step["tokens"]
        prompt, completion = tokens["prompt_ids"], tokens["completion_ids"]
        mask = np.array([*tokens["prompt_mask"], *tokens["completion_mask"]], bool)
        logprobs = np.array([0.0] * len(prompt) + tokens["completion_logprobs"], np.float32)
        return Sample(np.array(prompt + completion, np.int32), mask, logprobs, np.where(mask, 0, -1).astype(np.int32))

    async def play(number: int, room: asyncio.Semaphore) -> Group:
        async with room:
            inputs = [dict(rows[number % len(rows)]) for _ in range(GROUP)]
            outputs = await env.run_group(inputs, resolved, "m", sampling, state_columns=["trajectory"])
        rollouts = [
            Rollout(tuple(map(sample, output["trajectory"])), output["reward"], dict(output["metrics"]), False, ())
            for output in outputs
        ]
        return Group(number, tuple(rollouts), "overhead", number % len(rows), 1.0)

    async def batch(groups: int, step: int) -> None:
        room = asyncio.Semaphore(32)
        played = await asyncio.gather(*(play(number, room) for number in range(groups)))
        advantages = [group.rewards - group.rewards.mean() for group in played]
        packed = pack(played, advantages, shape.prompt + shape.completion + 100)
        (directory / "verifiers").mkdir(exist_ok=True)
        fields = {"branch": 0, "step": step, "async_level": 2}
        write_batch(directory / f"verifiers/{shape.completion}_{step}", packed, fields)

    await batch(8, 0)
    start = time.process_time()
    await batch(shape.verifiers_groups, 1)
    return {"verifiers_cpu_ms": 1000 * (time.process_time() - start) / (shape.verifiers_groups * GROUP)}


PLAYERS = {"ours": run_ours, "verifiers": run_verifiers}


@contextmanager
def engine(directory: Path, shape: Shape) -> Iterator[str]:
    command = [sys.executable, str(HERE / "overhead/engine.py"), str(directory / "tokenizer")]
    with subprocess.Popen(
        [*command, str(shape.prompt), str(shape.completion)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def prepare(directory: Path) -> None:
    sys.path.insert(0, str(HERE))
    from overhead.material import ENVIRONMENT, make_prompts, make_tokenizer

    tokenizer = make_tokenizer(directory / "tokenizer")
    (directory / "overhead_environment.py").write_text(ENVIRONMENT)
    for shape in SHAPES.values():
        (directory / f"{shape.prompt}.json").write_text(json.dumps(make_prompts(tokenizer, shape.prompt)))


def measure(directory: Path, name: str, player: str) -> dict[str, float]:
    """Measure in a new process; the last line of its output is the result."""
    with engine(directory, SHAPES[name]) as url:
        environment = {**os.environ, "PYTHONPATH": str(directory), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--player", player, "--shape", name, "--url", url, "--dir", str(directory)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{player}, {name}: {done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--player", choices=PLAYERS, help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="only this shape")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.player is not None:
        print(json.dumps(uvloop.run(PLAYERS[args.player](args.dir, args.url, SHAPES[args.shape[0]]))))
        return
    columns = ("rollout", "main", "limit", "total", "verifiers", "share", "in flight", "lag ms")
    table = Table(*columns, title="CPU milliseconds per rollout")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare(directory)
        for shape in args.shape or MEASURED:
            result = measure(directory, shape, "ours") | measure(directory, shape, "verifiers")
            table.add_row(
                shape, f"{result['cpu_ms_main']:.2f}", "2" if shape == "long" else "1", f"{result['cpu_ms_total']:.2f}",
                f"{result['verifiers_cpu_ms']:.2f}", f"{result['cpu_ms_total'] / result['verifiers_cpu_ms']:.0%}",
                f"{result.pop('in_flight'):.0f}", f"{result['loop_lag_p99_ms']:.0f}",
            )  # fmt: skip
            figures |= {key if shape == "long" else f"{shape}_{key}": round(value, 3) for key, value in result.items()}
    Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
