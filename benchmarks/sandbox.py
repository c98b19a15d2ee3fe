"""Latency, throughput and memory of the sandbox, next to a plain `python -c`, a cold bubblewrap, and Docker if present.

    uv run python benchmarks/sandbox.py [--json FILE]

All variants run the same program and alternate within one run, because the load of a shared machine changes absolute
times. About one minute on two cores. `--json FILE` writes {warm_p50_ms, warm_p50_over_subprocess,
throughput_over_subprocess, burst_1000_answered, pool_start_seconds} and further figures of the table.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median, quantiles

import psutil
from rich.console import Console
from rich.table import Table

from prime_rl_sandbox.jail.bubblewrap import JAIL_UID, build_command, find_bubblewrap, find_interpreter
from prime_rl_sandbox.sandbox import Sandbox

PROGRAM = """
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
def reverse(text):
    return text[::-1]
def evens(values):
    return [value for value in values if value % 2 == 0]
assert fib(10) == 55
assert reverse("abc") == "cba"
assert evens(range(5)) == [0, 2, 4]
print("ok")
"""
HOSTILE = [
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "while True: print('x' * 10**6)",
    "x = []\nwhile True: x.append(bytearray(2**24))",
    "while True: pass",
]
LAG_INTERVAL_SECONDS = 0.005
IN_FLIGHT = 16
PAUSE_SECONDS = 0.03
Run = Callable[[], Awaitable[None]]


async def run_process(*command: str, user: int | None = None) -> None:
    """Run a command and check its output."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        env={},
        cwd="/",
    )
    output, errors = await process.communicate()
    assert output == b"ok\n", errors


async def time_one(run: Run) -> float:
    begin = time.perf_counter()
    await run()
    return 1000 * (time.perf_counter() - begin)


async def measure_latency(variants: dict[str, Run], count: int) -> dict[str, list[float]]:
    """Return milliseconds of single executions; the variants take turns."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(count):
        for name, run in variants.items():
            times[name].append(await time_one(run))
            await asyncio.sleep(PAUSE_SECONDS)
    return times


async def measure_throughput(run: Run, count: int) -> float:
    """Return executions per second with several in flight."""
    numbers = iter(range(count))

    async def take() -> None:
        for _ in numbers:
            await run()

    begin = time.perf_counter()
    await asyncio.gather(*(take() for _ in range(IN_FLIGHT)))
    return count / (time.perf_counter() - begin)


def memory_of(pids: list[int]) -> tuple[float, int]:
    """Return the proportional memory in MiB, and the number of processes of the jails."""
    processes = [
        child for pid in pids for child in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    ]
    return sum(process.memory_full_info().pss for process in processes) / 2**20, len(processes)


async def measure_loop_lag(sandbox: Sandbox) -> float:
    """Return the 99th percentile of the event loop's lag in milliseconds, while hostile programs run."""
    lags: list[float] = []
    task = asyncio.gather(*(sandbox.run(code, timeout=2) for code in HOSTILE * 4))
    while not task.done():
        begin = time.perf_counter()
        await asyncio.sleep(LAG_INTERVAL_SECONDS)
        lags.append(1000 * (time.perf_counter() - begin - LAG_INTERVAL_SECONDS))
    await task
    return quantiles(lags, n=100)[98]


def make_variants(sandbox: Sandbox) -> dict[str, Run]:
    """Return the ways to run the program; `subprocess` isolates nothing."""
    user = JAIL_UID if os.getuid() == 0 else None
    interpreter = str(find_interpreter(user))

    async def warm() -> None:
        result = await sandbox.run(PROGRAM, timeout=60)
        assert result.stdout == "ok\n", result

    bubblewrap = [*build_command(find_bubblewrap(), Path(interpreter), []), "--remount-ro", "/", "--"]
    cold = [*bubblewrap, interpreter, "-I", "-S", "-c", PROGRAM]
    variants: dict[str, Run] = {
        "sandbox": warm,
        "subprocess": lambda: run_process(interpreter, "-c", PROGRAM),
        "cold bubblewrap": lambda: run_process(*cold, user=user),
    }
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "info"], capture_output=True, check=False).returncode == 0:
        image = [docker, "run", "--rm", "--network=none", "python:3.11-slim", "python", "-c", PROGRAM]
        variants["docker run"] = lambda: run_process(*image)
    return variants


async def measure(count: int) -> dict[str, float]:
    """Measure everything and print the table."""
    begin = time.perf_counter()
    async with Sandbox() as sandbox:
        figures: dict[str, float] = {"pool_start_seconds": time.perf_counter() - begin}
        variants = make_variants(sandbox)
        await measure_latency(variants, 5)
        latencies = await measure_latency(variants, count)
        rates: dict[str, list[float]] = {"sandbox": [], "subprocess": [], "cold bubblewrap": []}
        for _ in range(3):
            for name, values in rates.items():
                values.append(await measure_throughput(variants[name], 2 * count))
        memory, num_processes = memory_of(sandbox.jail_pids)
        figures["memory_mib"], figures["num_processes"] = memory, num_processes
        for size in (200, 1000):
            begin = time.perf_counter()
            results = await asyncio.gather(*(sandbox.run(PROGRAM, timeout=60) for _ in range(size)))
            figures[f"burst_{size}_seconds"] = time.perf_counter() - begin
            figures[f"burst_{size}_answered"] = sum(result.stdout == "ok\n" for result in results)
        begin = time.perf_counter()
        slept = await asyncio.gather(*(sandbox.run("import time; time.sleep(1)", timeout=60) for _ in range(200)))
        assert all(result.ok for result in slept)
        figures["sleep_200_seconds"] = time.perf_counter() - begin
        figures["hostile_loop_lag_p99_ms"] = await measure_loop_lag(sandbox)
    table = Table("variant", "p50 ms", "p99 ms", f"executions/s, {IN_FLIGHT} in flight", title="one small program")
    for name, times in latencies.items():
        rate = f"{median(rates[name]):.0f}" if name in rates else ""
        table.add_row(name, f"{median(times):.1f}", f"{quantiles(times, n=100)[98]:.1f}", rate)
    Console().print(table)
    figures["warm_p50_ms"] = median(latencies["sandbox"])
    figures["warm_p99_ms"] = quantiles(latencies["sandbox"], n=100)[98]
    figures["warm_p50_over_subprocess"] = median(latencies["sandbox"]) / median(latencies["subprocess"])
    ratios = [ours / theirs for ours, theirs in zip(rates["sandbox"], rates["subprocess"], strict=True)]
    figures["throughput_over_subprocess"] = median(ratios)
    figures["executions_per_second"] = median(rates["sandbox"])
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="single executions of each variant")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    figures = asyncio.run(measure(args.count))
    for name, value in figures.items():
        print(f"{name:28} {value:g}")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
