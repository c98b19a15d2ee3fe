"""Event loop lag with 2,000 short rollouts in flight, and the limit of one server process.

    uv run python benchmarks/rollouts_in_flight.py --json benchmarks/results/rollouts_in_flight.json

The server has no model (overhead/engine.py); the token stream is the real one. Two measurements, three minutes on two
cores:

lag         The real orchestrator and environment worker run groups of 8 rollouts (5 prompt tokens, 4 sampled) of 2 to 6
            seconds, 2,000 at a time. A timer of 20 ms in each process measures the delay of its event loop; `own` is
            without the time in which other processes had the cores.
throughput  Clients in two processes keep 2,000 requests without latency in flight. The rollouts per CPU second of the
            server's process are what one core can serve.

The first batches are not measured. Milliseconds; `--json FILE` writes the figures.
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
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import uvloop
from overhead.lag_log import read_lag, record_lag
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
GROUP = 8
PROMPT_TOKENS, COMPLETION_TOKENS = 5, 4
BATCH = 1024
WARM_UP = 3
IN_FLIGHT = 2000
LATENCY_SECONDS = 4.0
CLIENTS = 2
WARM_UP_SECONDS = 2.0
PROCESSES = ("server", "worker", "orchestrator")

ENVIRONMENT = """
import asyncio
import json
from pathlib import Path

import verifiers as vf
from datasets import Dataset
from overhead.lag_log import record_lag


def load_environment(prompts, lag):
    tasks = []

    def reward(completion, **kwargs):
        if not tasks:
            tasks.append(asyncio.get_running_loop().create_task(record_lag(Path(lag))))
        return len(completion[-1].content) % 7 / 7

    rows = [{"question": text, "answer": ""} for text in json.loads(Path(prompts).read_text())]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[reward]))
"""


class Meter:
    """Replaces the monitor: reads the clocks when the measured batches begin and end."""

    def __init__(self, processes: Mapping[str, psutil.Process], steps: int) -> None:
        self._processes, self._steps = processes, steps
        self._times: list[tuple[float, dict[str, float]]] = []

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Read the clocks."""
        if step in (WARM_UP - 1, self._steps - 1):
            self._times.append((time.monotonic(), {name: cpu_seconds(each) for name, each in self._processes.items()}))

    def log_samples(self, *_: Any) -> None:
        """Do nothing."""

    def log_distributions(self, *_: Any) -> None:
        """Do nothing."""

    def result(self) -> dict[str, Any]:
        """Return the window and the CPU milliseconds per rollout of each process."""
        (begin, before), (end, after) = self._times
        rollouts = BATCH * (self._steps - WARM_UP)
        cpu = {name: 1000 * (after[name] - before[name]) / rollouts for name in before}
        return {"begin": begin, "end": end, "cpu_ms": cpu, "rollouts_per_s": rollouts / (end - begin)}


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def run_orchestrator(directory: Path, url: str, server: int, steps: int) -> dict[str, Any]:
    """Run the orchestrator against the server at `url`, with the process id `server`."""
    from prime_rl.configs.client import ClientConfig
    from prime_rl.configs.environment import EnvConfig
    from prime_rl.configs.orchestrator import OrchestratorConfig, OrchestratorModelConfig
    from prime_rl.configs.sampling import SamplingConfig
    from prime_rl.orchestrator.orchestrator import OrchestratorLoop
    from prime_rl.orchestrator.orchestrator_setup import connect, model_access, start_environments
    from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher

    run = directory / "run"
    arguments = {"prompts": str(directory / "prompts.json"), "lag": str(directory / "worker")}
    config = OrchestratorConfig(
        model=OrchestratorModelConfig(name=str(directory / "tokenizer")),
        client=ClientConfig(base_url=[url]),
        env=[EnvConfig(id="in_flight_environment", args=arguments)],
        batch_size=BATCH,
        rollouts_per_example=GROUP,
        seq_len=128,
        sampling=SamplingConfig(max_tokens=COMPLETION_TOKENS),
        async_level=2,
        max_concurrent=IN_FLIGHT,
        max_steps=steps,
        output_dir=run,
        run_id="overhead",  # the one that the server reports as the holder of its lease
    )
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.post(f"{url}/train", json={"run": str(run), "steps": steps})
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(WorkerLauncher())
        environments = await start_environments(config, host, model_access(config), stack)
        children = psutil.Process().children(recursive=True)
        worker = max(children, key=lambda child: len(child.parents()))  # the fork server's child
        meter = Meter({"server": psutil.Process(server), "worker": worker, "orchestrator": psutil.Process()}, steps)
        servers = [await connect(config, url, stack)]
        in_flight: list[int] = []
        tasks = [
            asyncio.create_task(record_lag(directory / "orchestrator")),
            asyncio.create_task(watch(servers[0], in_flight)),
        ]
        await OrchestratorLoop(config, environments, servers, meter).run()  # type: ignore[arg-type]
        for task in tasks:
            task.cancel()
    return meter.result() | {"in_flight": float(np.percentile(in_flight, 50))}


async def watch(server: Any, in_flight: list[int]) -> None:
    while True:
        in_flight.append(server.in_flight)
        await asyncio.sleep(0.05)


async def run_client(url: str, seconds: float) -> dict[str, Any]:
    """Keep requests in flight and count the answers after the warm-up."""
    from prime_rl.rollouts.clients.inference_client import InferenceClient

    sampling = {"temperature": 1.0, "max_tokens": COMPLETION_TOKENS}
    prompts = [[(7 * number + i) % 90 for i in range(PROMPT_TOKENS)] for number in range(64)]
    answered = 0
    async with InferenceClient(url, "m", "") as client:

        async def groups(number: int) -> None:
            nonlocal answered
            while True:
                number += 1
                prompt = prompts[number % len(prompts)]
                await asyncio.gather(*(client.generate(prompt, sampling | {"seed": seed}) for seed in range(GROUP)))
                answered += GROUP

        running = [asyncio.create_task(groups(number)) for number in range(IN_FLIGHT // GROUP // CLIENTS)]
        await asyncio.sleep(WARM_UP_SECONDS)
        begin, first = time.monotonic(), answered
        await asyncio.sleep(seconds)
        result = {"begin": begin, "rollouts": answered - first, "seconds": time.monotonic() - begin}
        assert client._stream.is_offered
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return result


@contextmanager
def engine(directory: Path, latency_seconds: float) -> Iterator[tuple[str, int]]:
    """Start the server; yield its URL and process id."""
    command = [sys.executable, str(HERE / "overhead/engine.py"), str(directory / "tokenizer"), str(PROMPT_TOKENS)]
    command += [str(COMPLETION_TOKENS), "--latency", str(latency_seconds), "--lag", str(directory / "server")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}", process.pid
        finally:
            process.kill()


def start(directory: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Start this program again; the last line of its output is its result."""
    paths = os.pathsep.join([str(directory), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--dir", str(directory), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(process: "subprocess.Popen[str]") -> dict[str, Any]:
    output, errors = process.communicate()
    if process.returncode != 0:
        sys.exit(errors[-3000:])
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def measure_lag(directory: Path, steps: int) -> dict[str, Any]:
    """Return lag and CPU time of each process with rollouts in flight."""
    with engine(directory, LATENCY_SECONDS) as (url, pid):
        found = result_of(start(directory, "--orchestrate", str(steps), "--url", url, "--server", str(pid)))
    result: dict[str, Any] = {"in_flight": found["in_flight"], "rollouts_per_s": round(found["rollouts_per_s"], 1)}
    for name in PROCESSES:
        lag = asdict(read_lag(directory / name, found["begin"], found["end"]))
        result[name] = {"cpu_ms": found["cpu_ms"][name]} | {f"lag_{key}_ms": value for key, value in lag.items()}
        result[name]["ticks"] = result[name].pop("lag_ticks_ms")
        result[name] = {key: round(value, 3) for key, value in result[name].items()}
    return result


def measure_throughput(directory: Path, seconds: float) -> dict[str, float]:
    """Return the rollouts per CPU second of the server, and per second."""
    with ExitStack() as stack:
        url, pid = stack.enter_context(engine(directory, 0.0))
        server, seconds_text = psutil.Process(pid), str(seconds)
        clients = [start(directory, "--sample", seconds_text, "--url", url) for _ in range(CLIENTS)]
        before = cpu_seconds(server)
        found = [result_of(client) for client in clients]
        spent = cpu_seconds(server) - before
    rollouts = sum(client["rollouts"] for client in found)
    rates = sum(client["rollouts"] / client["seconds"] for client in found)
    return {"rollouts_per_cpu_s": rollouts / spent, "rollouts_per_s": rates}


def prepare(directory: Path) -> None:
    from overhead.material import make_prompts, make_tokenizer

    tokenizer = make_tokenizer(directory / "tokenizer")
    (directory / "in_flight_environment.py").write_text(ENVIRONMENT)
    (directory / "prompts.json").write_text(json.dumps(make_prompts(tokenizer, PROMPT_TOKENS)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help=f"batches of {BATCH} rollouts of the first measurement")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the second measurement")
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores", help="description for the file")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    for hidden in ("--dir", "--url", "--server", "--orchestrate", "--sample"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.orchestrate:
        work = run_orchestrator(Path(args.dir), args.url, int(args.server), int(args.orchestrate))
        print(json.dumps(uvloop.run(work)))
        return
    if args.sample:
        print(json.dumps(uvloop.run(run_client(args.url, float(args.sample)))))
        return
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        lag = measure_lag(Path(name), args.steps)
        throughput = measure_throughput(Path(name), args.seconds)
    figures = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "machine": args.machine, "lag": lag}
    figures["throughput"] = {key: round(value) for key, value in throughput.items()}
    report(figures)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


def report(figures: Mapping[str, Any]) -> None:
    lag, throughput = figures["lag"], figures["throughput"]
    title = f"{lag['in_flight']:.0f} rollouts in flight, {lag['rollouts_per_s']:.0f} per second"
    table = Table("process", "lag p99, ms", "own", "median", "maximum", "CPU ms per rollout", title=title)
    for name in PROCESSES:
        keys = ("lag_p99_ms", "lag_own_p99_ms", "lag_median_ms", "lag_maximum_ms", "cpu_ms")
        table.add_row(name, *(f"{lag[name][key]:.2f}" for key in keys))
    Console().print(table)
    print(
        f"server: {throughput['rollouts_per_cpu_s']} rollouts per CPU second, {throughput['rollouts_per_s']} per second"
    )


if __name__ == "__main__":
    main()
