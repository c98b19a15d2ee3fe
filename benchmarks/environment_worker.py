"""CPU time of an environment worker per rollout of reverse_text, with a model of no cost.

    uv run python benchmarks/environment_worker.py --against ../other-checkout/src

One worker process runs groups of 8 single-turn rollouts (5 prompt tokens, 4 sampled) against a server in another
process with canned responses. `--own-interpreter` adds a process for the environment. With `--against`, the sources of
this checkout and of the given directory run at the same time, because the load of a shared machine changes the CPU time
of the same work. The pairs run three times; the table shows the median CPU milliseconds per rollout. About one minute
per pair on two cores. `--json FILE` writes {worker_cpu_ms, other_worker_cpu_ms, ratio}; the latter two only with
`--against`.

`--agent` measures the CPU milliseconds of a turn of an agent instead, those of the worker and those of the agents in a
process of their own, and the worker's memory of an open session: 1,000 agents at once, each with five model calls over
HTTP.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
SOURCES = HERE.parent / "src"
MODEL = HERE.parent / "configs/reverse_text/model"
GROUP = 8
CONCURRENT_GROUPS = 64
WARM_UP_GROUPS = 128
PROMPT_TOKENS, COMPLETION_TOKENS = 5, 4
SESSIONS, TURNS = 1000, 5


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def run_groups(url: str, name: str, groups: int, own_interpreter: bool) -> float:
    """Return the CPU milliseconds per rollout of the worker, and of its environment's process."""
    from prime_rl.configs.environment import EnvConfig
    from prime_rl.rollouts.workers.environment_pool import EnvironmentPool
    from prime_rl.rollouts.workers.protocol import ModelAccess
    from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher

    interpreter = sys.executable if own_interpreter else None
    args = {"words": 2000} if name == "reverse_text" else {}
    environment = EnvConfig(id=name, args=args, interpreter=interpreter)
    async with (
        WorkerLauncher() as launcher,
        EnvironmentPool(environment, launcher, ModelAccess("m", str(MODEL))) as pool,
    ):

        async def take(numbers: Iterator[int]) -> None:
            for number in numbers:
                sampling = {"temperature": 1.0, "max_tokens": 8}
                rollouts = await pool.run_group(number % len(pool), GROUP, url, sampling, 512, [0, number])
                assert len(rollouts) == GROUP

        async def run(numbers: range) -> None:
            shared = iter(numbers)
            await asyncio.gather(*(take(shared) for _ in range(CONCURRENT_GROUPS)))

        children = psutil.Process().children(recursive=True)
        await run(range(WARM_UP_GROUPS))
        before = sum(map(cpu_seconds, children))
        await run(range(WARM_UP_GROUPS, WARM_UP_GROUPS + groups))
        return 1000 * (sum(map(cpu_seconds, children)) - before) / (groups * GROUP)


async def run_agents(url: str, rounds: int) -> tuple[float, float, float]:
    """Return the CPU milliseconds per turn of the worker and of the agents, and the KiB per open session."""
    from prime_rl.configs.environment import EnvConfig
    from prime_rl.rollouts.workers.environment_pool import EnvironmentPool
    from prime_rl.rollouts.workers.protocol import ModelAccess
    from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher

    with tempfile.TemporaryDirectory() as name:
        rows, memory, agents = Path(name) / "rows.csv", Path(name) / "memory", Path(name) / "agents"
        rows.write_text("question,answer\n" + "".join(f"What is {number}?,\n" for number in range(2000)))
        agent = f"{HERE}/overhead/agent.py:solve"
        environment = EnvConfig(id="dataset", args={"data_path": str(rows), "grader": "none"}, agent=agent)
        os.environ |= {"AGENT_SESSIONS": str(SESSIONS), "AGENT_TURNS": str(TURNS)}
        os.environ |= {"AGENT_MEMORY": str(memory), "AGENT_SOCKET": str(agents)}
        elsewhere = await asyncio.create_subprocess_exec(sys.executable, str(HERE / "overhead/agent.py"), str(agents))
        while not agents.exists():
            await asyncio.sleep(0.1)
        async with (
            WorkerLauncher() as launcher,
            EnvironmentPool(environment, launcher, ModelAccess("m", str(MODEL))) as pool,
        ):

            async def run_round(first: int) -> None:
                sampling = {"temperature": 1.0, "max_tokens": 8}
                groups = range(first, first + SESSIONS // GROUP)
                runs = [pool.run_group(group % 1000, GROUP, url, sampling, 4096, [0, group]) for group in groups]
                assert all(rollout.reward == 1.0 for rollouts in await asyncio.gather(*runs) for rollout in rollouts)

            agent = psutil.Process(elsewhere.pid)
            children = [child for child in psutil.Process().children(recursive=True) if child != agent]
            idle = max(child.memory_full_info().uss for child in children)  # the worker's
            await run_round(0)
            before, agents_before = sum(map(cpu_seconds, children)), cpu_seconds(agent)
            for number in range(rounds):
                await run_round(1000 * (number + 1))
            turns = rounds * SESSIONS * TURNS
            worker_ms = 1000 * (sum(map(cpu_seconds, children)) - before) / turns
            agent_ms = 1000 * (cpu_seconds(agent) - agents_before) / turns
        elsewhere.kill()
        await elsewhere.wait()
        return worker_ms, agent_ms, (int(memory.read_text()) - idle) / SESSIONS / 1024


def measure(sides: Mapping[str, Path], groups: int, *options: str) -> dict[str, float]:
    """Measure all sides at the same time, each in new processes; the last line of their output is the result."""
    with ExitStack() as stack:
        started = []
        for side, sources in sides.items():
            url = stack.enter_context(engine())
            path = os.pathsep.join([str(sources), os.environ.get("PYTHONPATH", "")])
            environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--url", url, "--groups", str(groups), *options]
            started.append((side, subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)))
        results = {side: process.communicate()[0] for side, process in started}
        if failed := [side for side, process in started if process.returncode != 0]:
            sys.exit(f"{failed[0]} failed")
    return {side: float(output.splitlines()[-1]) for side, output in results.items()}


@contextmanager
def engine() -> Iterator[str]:
    """Start the server; yield its URL."""
    command = [sys.executable, str(HERE / "overhead/engine.py"), str(MODEL), str(PROMPT_TOKENS), str(COMPLETION_TOKENS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="also measure the package in this directory")
    parser.add_argument("--env", default="reverse_text", help="id or file of another environment")
    parser.add_argument("--own-interpreter", action="store_true", help="the environment has an interpreter of its own")
    parser.add_argument("--agent", action="store_true", help="measure turns of 1,000 agents")
    parser.add_argument("--groups", type=int, default=1000, help="measured groups of each run")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each side")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent:
        with engine() as url:
            worker_ms, agent_ms, kibibytes = uvloop.run(run_agents(url, args.pairs))
        print(f"CPU ms per turn: {worker_ms:.2f} worker, {agent_ms:.2f} agent; {kibibytes:.0f} KiB per open session")
        return
    if args.url is not None:
        print(uvloop.run(run_groups(args.url, args.env, args.groups, args.own_interpreter)))
        return
    sides = {"worker_cpu_ms": SOURCES} | ({"other_worker_cpu_ms": args.against.resolve()} if args.against else {})
    options = ["--env", args.env, *(["--own-interpreter"] if args.own_interpreter else [])]
    runs = [measure(sides, args.groups, *options) for _ in range(args.pairs)]
    times = {side: [run[side] for run in runs] for side in sides}
    figures = {side: round(median(values), 4) for side, values in times.items()}
    if args.against:
        figures["ratio"] = round(median(run["worker_cpu_ms"] / run["other_worker_cpu_ms"] for run in runs), 3)
    table = Table("sources", "CPU ms per rollout", "runs", title=f"environment worker, {args.env}")
    for side, sources in sides.items():
        table.add_row(str(sources), f"{figures[side]:.3f}", " ".join(f"{value:.3f}" for value in times[side]))
    Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
