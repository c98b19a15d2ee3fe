"""How the orchestrator's cost depends on the size of the run: rollouts in flight, finished groups, examples, servers.

    uv run python benchmarks/scale.py --json benchmarks/results/scale.json

The real orchestrator, ledger and environment workers with 1,000,000 examples and 64 servers without a model
(overhead/engine.py). Two measurements, six minutes on two cores:

in flight   Groups of 8 rollouts (5 prompt tokens, 4 sampled) at the same rate, with 100 rollouts in flight and with
            10,000: CPU time of the orchestrator's process and of its workers, event loop lag, and the growth of memory
            over the measured batches.
restart     An earlier process left 100,000 finished groups that were not shipped. The time from the start of the
            orchestrator until it has shipped a batch. Then the same with 1,000 groups of rollouts of 4,000 tokens.

The first batches are not measured. `--json FILE` writes {cpu_ms_100, cpu_ms_10000, loop_lag_p99_ms, restart_seconds}
and further figures. CPU times are milliseconds per rollout, of the orchestrator with its workers; `_main` leaves them
out.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import psutil
import uvloop
from overhead.lag_log import read_lag, record_lag
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from prime_rl.configs.orchestrator import OrchestratorConfig

HERE = Path(__file__).parent
GROUP = 8
PROMPT_TOKENS, COMPLETION_TOKENS = 5, 4
WARM_UP = 2
"""Batches that are not measured."""
RESTART_BATCH = 8192
LONG_TOKENS = 4000


@dataclass(frozen=True)
class Size:
    """The size of the run.

    Attributes:
        in_flight: rollouts in flight, few and many.
        batch: rollouts of a batch.
        steps: number of batches, with those that are not measured.
        rate: rollouts per second, unless the machine is slower.
    """

    in_flight: tuple[int, int] = (100, 10_000)
    batch: int = 4096
    steps: int = 5
    rate: float = 250.0
    servers: int = 64
    examples: int = 1_000_000
    finished: int = 100_000
    finished_long: int = 1000
    workers: int = 2


TINY = Size(
    (16, 64), batch=64, steps=4, rate=400.0, servers=4, examples=1000, finished=200, finished_long=20, workers=1
)

ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset


def load_environment(prompts, examples):
    def reward(completion, **kwargs):
        return len(completion[-1].content) % 7 / 7

    messages = [[{"role": "user", "content": text}] for text in prompts]
    rows = {"prompt": [messages[number % len(messages)] for number in range(examples)], "answer": [""] * examples}
    return vf.SingleTurnEnv(dataset=Dataset.from_dict(rows), rubric=vf.Rubric(funcs=[reward]))
"""


class Meter:
    """Replaces the monitor: reads the clocks after each batch, and reports that a batch was shipped."""

    def __init__(self, workers: Sequence[psutil.Process]) -> None:
        self._workers = workers
        self.readings: list[dict[str, float]] = []
        self.shipped = asyncio.Event()

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Read the clocks. Called in a thread."""
        workers = sum(cpu_seconds(worker) for worker in self._workers)
        memory = psutil.Process().memory_info().rss / 1024**2
        self.readings.append(
            {"time": time.monotonic(), "main": time.process_time(), "workers": workers, "memory": memory}
        )
        self.shipped.set()

    def log_samples(self, *_: Any) -> None:
        """Do nothing."""

    def log_distributions(self, *_: Any) -> None:
        """Do nothing."""


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def make_config(directory: Path, urls: Sequence[str], size: Size, **settings: Any) -> "OrchestratorConfig":
    from prime_rl.configs.client import ClientConfig
    from prime_rl.configs.environment import EnvConfig
    from prime_rl.configs.orchestrator import OrchestratorConfig, OrchestratorModelConfig
    from prime_rl.configs.sampling import SamplingConfig

    prompts = json.loads((directory / "prompts.json").read_text())
    return OrchestratorConfig(
        model=OrchestratorModelConfig(name=str(directory / "tokenizer")),
        client=ClientConfig(base_url=list(urls)),
        env=[EnvConfig(id="scale_environment", args={"prompts": prompts, "examples": size.examples})],
        rollouts_per_example=GROUP,
        seq_len=2 * LONG_TOKENS,
        sampling=SamplingConfig(max_tokens=COMPLETION_TOKENS),
        workers_per_env=size.workers,
        run_id="overhead",  # the one that the servers report as the holder of their lease
        **settings,
    )


async def run_in_flight(directory: Path, urls: Sequence[str], size: Size, in_flight: int) -> dict[str, float]:
    """Run the orchestrator with rollouts in flight; return CPU milliseconds per rollout, lag and memory."""
    from prime_rl.orchestrator.orchestrator import OrchestratorLoop
    from prime_rl.orchestrator.orchestrator_setup import connect, model_access, start_environments
    from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher

    config = make_config(
        directory, urls, size, batch_size=size.batch, async_level=2, max_concurrent=in_flight, max_steps=size.steps,
        output_dir=directory / f"run_{in_flight}",
    )  # fmt: skip
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.post(f"{urls[0]}/train", json={"run": str(config.output_dir), "steps": size.steps})
    async with AsyncExitStack() as stack:
        launcher = await stack.enter_async_context(WorkerLauncher())
        environments = await start_environments(config, launcher, model_access(config), stack)
        meter = Meter(psutil.Process().children(recursive=True))
        servers = [await connect(config, url, stack) for url in urls]
        counts: list[int] = []
        tasks = [asyncio.create_task(record_lag(directory / "lag")), asyncio.create_task(watch(servers, counts))]
        await OrchestratorLoop(config, environments, servers, meter).run()  # type: ignore[arg-type]
        for task in tasks:
            task.cancel()
    before, after = meter.readings[WARM_UP - 1], meter.readings[-1]
    rollouts = size.batch * (size.steps - WARM_UP)
    main, workers = (1000 * (after[name] - before[name]) / rollouts for name in ("main", "workers"))
    lag = asdict(read_lag(directory / "lag", before["time"], after["time"]))
    return {
        "main": main, "workers": workers, "in_flight": float(np.percentile(counts, 50)),
        "rate": rollouts / (after["time"] - before["time"]),
        "memory_before": before["memory"], "memory_after": after["memory"],
        "lag_p99": lag["p99"], "lag_own_p99": lag["own_p99"], "lag_maximum": lag["maximum"],
    }  # fmt: skip


async def watch(servers: Sequence[Any], counts: list[int]) -> None:
    while True:
        counts.append(sum(server.in_flight for server in servers))
        await asyncio.sleep(0.05)


async def run_restart(directory: Path, urls: Sequence[str], size: Size, finished: int, tokens: int) -> dict[str, float]:
    """Restart with finished groups, whose rollouts have `tokens`; return the seconds until a batch is shipped."""
    from prime_rl.orchestrator.orchestrator import OrchestratorLoop
    from prime_rl.orchestrator.orchestrator_setup import connect, model_access, start_environments
    from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher

    batch = min(RESTART_BATCH if tokens < LONG_TOKENS else GROUP, finished // 2 * GROUP)
    level = finished * GROUP // batch  # the batches that the bound allows to be sampled ahead
    config = make_config(
        directory, urls, size, batch_size=batch, async_level=level, max_concurrent=size.in_flight[0],
        output_dir=directory / f"restart_{tokens}", restart=True,
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        launcher = await stack.enter_async_context(WorkerLauncher())
        environments = await start_environments(config, launcher, model_access(config), stack)
        leave_finished_groups(config, environments, finished, tokens)
        meter = Meter([])
        servers = [await connect(config, url, stack) for url in urls]
        started = time.monotonic()
        run = asyncio.create_task(OrchestratorLoop(config, environments, servers, meter).run())  # type: ignore[arg-type]
        shipping = asyncio.create_task(meter.shipped.wait())
        await asyncio.wait({run, shipping}, return_when=asyncio.FIRST_COMPLETED)
        seconds = time.monotonic() - started
        shipping.cancel()
        if run.done():
            run.result()
        run.cancel()
        await asyncio.wait({run})
    return {"restart": seconds, "memory": psutil.Process().memory_info().rss / 1024**2}


def leave_finished_groups(config: "OrchestratorConfig", environments: Sequence[Any], count: int, tokens: int) -> None:
    """Write the ledger and the groups of a process that finished `count` groups and shipped none."""
    from prime_rl.core.types import Group, Rollout, Sample
    from prime_rl.orchestrator.example_stream import ExampleStream, StreamEnvironment
    from prime_rl.orchestrator.ledger.ledger import Ledger

    [pool], [env] = environments, config.env
    source = StreamEnvironment(pool.name, len(pool), env.weight, config.buffer)
    ledger = Ledger.start(config.run_paths, 0, ExampleStream([source], config.seed))
    mask = np.arange(tokens) >= PROMPT_TOKENS
    sample = Sample(
        np.arange(len(mask), dtype=np.int32), mask, np.where(mask, -0.5, 0).astype(np.float32),
        np.where(mask, 0, -1).astype(np.int32),
    )  # fmt: skip
    text = (("user", "a prompt"), ("assistant", "a completion"))
    rollouts = tuple(Rollout((sample,), index / GROUP, {}, False, text) for index in range(GROUP))
    for _ in range(count):
        draw = ledger.draw()
        ledger.issued(draw.group_id, 0, config.async_level)
        ledger.done(Group(draw.group_id, rollouts, pool.name, draw.example, 1.0))
    ledger.close()


@contextmanager
def engine(directory: Path, size: Size, latency_seconds: float) -> Iterator[list[str]]:
    """Start the servers, all in one process; yield their URLs."""
    command = [sys.executable, str(HERE / "overhead/engine.py"), str(directory / "tokenizer"), str(PROMPT_TOKENS)]
    command += [str(COMPLETION_TOKENS), "--servers", str(size.servers), "--latency", str(latency_seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            ports = [process.stdout.readline().strip() for _ in range(size.servers)]
            yield [f"http://127.0.0.1:{port}" for port in ports]
        finally:
            process.kill()


def measure(directory: Path, part: str, size: Size, in_flight: int) -> dict[str, float]:
    """Run a part of the benchmark in a new process; the last line of its output is the result."""
    with engine(directory, size, in_flight / size.rate) as urls:
        paths = os.pathsep.join([str(directory), str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--part", part, "--in-flight", str(in_flight), "--dir", str(directory)]
        command += ["--urls", ",".join(urls), *(["--tiny"] if size == TINY else [])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{part}: {done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def prepare(directory: Path) -> None:
    from overhead.material import make_prompts, make_tokenizer

    tokenizer = make_tokenizer(directory / "tokenizer")
    (directory / "scale_environment.py").write_text(ENVIRONMENT)
    (directory / "prompts.json").write_text(json.dumps(make_prompts(tokenizer, PROMPT_TOKENS)))


def figures_of(
    few: Mapping[str, float], many: Mapping[str, float], restart: Mapping[str, float], long: Mapping[str, float]
) -> dict[str, float]:
    figures = {
        "cpu_ms_100": few["main"] + few["workers"], "cpu_ms_10000": many["main"] + many["workers"],
        "loop_lag_p99_ms": many["lag_p99"], "restart_seconds": restart["restart"],
        "cpu_ms_main_100": few["main"], "cpu_ms_main_10000": many["main"],
        "loop_lag_own_p99_ms": many["lag_own_p99"], "loop_lag_maximum_ms": many["lag_maximum"],
        "rollouts_per_s_100": few["rate"], "rollouts_per_s_10000": many["rate"],
        "in_flight": many["in_flight"], "memory_mib_before": many["memory_before"],
        "memory_mib_after": many["memory_after"], "memory_mib_restart": restart["memory"],
        "restart_seconds_long": long["restart"], "memory_mib_restart_long": long["memory"],
    }  # fmt: skip
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--tiny", action="store_true", help="a run of seconds, to test the benchmark")
    parser.add_argument("--part", choices=("in_flight", "restart", "restart_long"), help=argparse.SUPPRESS)
    for hidden in ("--in-flight", "--urls", "--dir"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = TINY if args.tiny else Size()
    if args.part is not None:
        directory, urls = Path(args.dir), args.urls.split(",")
        if args.part == "restart":
            short = PROMPT_TOKENS + COMPLETION_TOKENS
            print(json.dumps(uvloop.run(run_restart(directory, urls, size, size.finished, short))))
        elif args.part == "restart_long":
            print(json.dumps(uvloop.run(run_restart(directory, urls, size, size.finished_long, LONG_TOKENS))))
        else:
            print(json.dumps(uvloop.run(run_in_flight(directory, urls, size, int(args.in_flight)))))
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare(directory)
        few, many = (measure(directory, "in_flight", size, in_flight) for in_flight in size.in_flight)
        short, long = (measure(directory, part, size, size.in_flight[0]) for part in ("restart", "restart_long"))
        figures = figures_of(few, many, short, long)
    table = Table("figure", "value")
    for row in figures.items():
        table.add_row(row[0], f"{row[1]:g}")
    Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
