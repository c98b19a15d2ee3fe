"""Memory and open files of every process of a real run, step by step.

    uv run --extra cpu python benchmarks/leaks.py --json benchmarks/results/leaks.json

Runs the CPU recipe of reverse_text with batches of 64 rollouts and 64 in flight for 200 steps, three to six minutes on
two cores. Arguments after `--` are passed to `rl`: `... -- --ckpt --ckpt.interval 20 --ckpt.keep-last 2`.

memory, MB      resident set, median over ten steps: around step 50, and at the end
growth          relative difference of the two; the limit is 5 %
private         growth of the memory that is not shared (USS), MB
files           open file descriptors, maximum over ten steps: around step 50, and at the end
threads         the same for threads

Samples are taken after each step of the trainer, of processes that run from step 50 to the end. The exit code is 1 if a
process exceeds the growth limit, opens more files, or was restarted.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from watchfiles import watch

from prime_rl.liveness.heartbeat_monitor import read_heartbeats
from prime_rl.storage.paths import RunPaths

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "configs/reverse_text/cpu.toml"
GROWTH_LIMIT = 0.05
"""Of the memory at the beginning of the steps that count."""
FILES_LIMIT = 2
"""Connections that are open at one moment and not at another."""
SPARE_STEPS = 10
"""Steps that the run would have gone on for."""
WINDOW = 10
"""Steps whose samples are put together, at both ends."""
SEEN_LIMIT = 0.8
"""Share of the steps that must have been seen: on a busy machine one look may find two steps done."""
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Sample:
    """One process after one step; memory in MB."""

    rss: float
    uss: float
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class Look:
    """Samples of all processes by process id after `step` steps."""

    step: int
    processes: Mapping[int, Sample]


@dataclass(frozen=True, slots=True)
class Row:
    """One process after the warm-up; `grew` is a fraction, `private` is in MB."""

    name: str
    pid: int
    memory_first: float
    memory_last: float
    grew: float
    private: float
    files_first: int
    files_last: int
    threads_first: int
    threads_last: int
    leaks: bool


def main() -> int:
    arguments = parse_arguments()
    directory = arguments.output_dir.resolve()
    shutil.rmtree(directory, ignore_errors=True)
    looks, names = measure(RunPaths(directory), arguments.steps, arguments.overrides)
    rows = summarise(looks, names, arguments.warmup)
    missed = missed_limits(rows, looks, names, arguments.warmup, arguments.steps)
    show(rows, len(looks))
    for line in missed:
        print(f"missed: {line}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report(rows, looks, missed, arguments), indent=1) + "\n")
    return 1 if missed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=50, help="steps before the measurement")
    parser.add_argument("--rollouts", type=int, default=64, help="rollouts in flight and in a batch")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/leaks"), help="directory of the run")
    parser.add_argument("overrides", nargs="*", help="further arguments of rl, after --")
    arguments = parser.parse_args()
    if arguments.steps < arguments.warmup + 2 * WINDOW:
        parser.error(f"--steps must be {2 * WINDOW} more than --warmup at least")
    count = str(arguments.rollouts)
    own = ["--orchestrator.batch-size", count, "--orchestrator.max-concurrent", count]
    # The processes exit one after the other, but all must run when the last step is sampled.
    own += ["--inference.server.port", str(free_port()), "--max-steps", str(arguments.steps + SPARE_STEPS)]
    own += ["--output-dir", str(arguments.output_dir.resolve())]
    # A rate that keeps the policy constant: lengths, and so memory, must not change by learning.
    own += ["--trainer.optim.lr", "1e-5", "--trainer.scheduler.min-lr", "1e-6"]
    arguments.overrides = [*own, *arguments.overrides]
    return arguments


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(paths: RunPaths, steps: int, overrides: Sequence[str]) -> tuple[list[Look], dict[int, str]]:
    """Run `rl` and sample all its processes after each step.

    Returns:
        The samples of each step, and the names of the processes.

    Raises:
        RuntimeError: the run failed.
    """
    log = paths.root.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sys.executable).with_name("rl")), "@", str(RECIPE), *overrides]
    looks: list[Look] = []
    names: dict[int, str] = {}
    with log.open("w") as output:
        run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            for done in steps_of(paths, run):
                looks.append(Look(done, look(run.pid, paths, names)))
                print(f"\rstep {done} of {steps}", end="", flush=True)
                if done >= steps:
                    break
            print()
        finally:
            run.terminate()
            code = run.wait()
    if not looks or looks[-1].step < steps or code not in (0, 143):
        raise RuntimeError(f"the run ended with {code} after {len(looks)} samples; see {log}")
    return looks, names


def steps_of(paths: RunPaths, run: "subprocess.Popen[bytes]") -> Iterator[int]:
    """Yield the number of completed steps after every step, until the run ends."""
    paths.metrics_dir.mkdir(parents=True, exist_ok=True)
    file, seen = paths.metrics("trainer"), 0
    for _ in watch(paths.metrics_dir, yield_on_timeout=True, rust_timeout=250, debounce=20, step=10):
        if run.poll() is not None:
            return
        done = file.read_bytes().count(b"\n") if file.exists() else 0
        if done > seen:
            seen = done
            yield done


def look(pid: int, paths: RunPaths, names: dict[int, str]) -> dict[int, Sample]:
    """Sample `pid` and all its descendants, and add the names of new ones."""
    found: dict[int, Sample] = {}
    beats = {beat.pid: beat.name for beat in read_heartbeats(paths).values()}
    with suppress(psutil.NoSuchProcess):  # the process has exited
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                memory = process.memory_full_info()
                found[process.pid] = Sample(
                    memory.rss / _MB, memory.uss / _MB, process.num_fds(), process.num_threads()
                )
                names[process.pid] = beats.get(process.pid) or names.get(process.pid) or command_of(process)
    return found


def command_of(process: psutil.Process) -> str:
    """Return a short name: the Python module or the process title."""
    line = process.cmdline()
    if "-m" in line[:-1]:
        return line[line.index("-m") + 1].removeprefix("prime_rl.")
    return Path(line[0]).name if line and line[0] else process.name()


def summarise(looks: Sequence[Look], names: Mapping[int, str], warmup: int) -> list[Row]:
    """Return one row for each process that ran from the warm-up to the end, the largest first."""
    first = [look.processes for look in looks if warmup <= look.step < warmup + WINDOW]
    last = [look.processes for look in looks if look.step > looks[-1].step - WINDOW]
    lasting = set.intersection(*(set(sample) for sample in (*first, *last)))
    rows = [_row(pid, names[pid], [s[pid] for s in first], [s[pid] for s in last]) for pid in lasting]
    return sorted(rows, key=lambda row: -row.memory_last)


def _row(pid: int, name: str, first: Sequence[Sample], last: Sequence[Sample]) -> Row:
    def both(key: str, reduce: Any) -> tuple[Any, Any]:
        return reduce(getattr(s, key) for s in first), reduce(getattr(s, key) for s in last)

    (rss, rss_last), (uss, uss_last) = both("rss", median), both("uss", median)
    (files, files_last), (threads, threads_last) = both("files", max), both("threads", max)
    grown = rss_last - rss
    leaks = grown > GROWTH_LIMIT * rss or files_last > files + FILES_LIMIT
    return Row(name, pid, rss, rss_last, grown / rss, uss_last - uss, files, files_last, threads, threads_last, leaks)


def missed_limits(
    rows: Sequence[Row], looks: Sequence[Look], names: Mapping[int, str], warmup: int, steps: int
) -> list[str]:
    """Describe the processes that missed a limit."""
    missed = [
        f"{row.name} (pid {row.pid}): {row.memory_first:.0f} -> {row.memory_last:.0f} MB ({row.grew:+.1%}), "
        f"{row.files_first} -> {row.files_last} files"
        for row in rows
        if row.leaks
    ]
    begin = next(look for look in looks if look.step >= warmup)
    there = set(begin.processes) - {row.pid for row in rows}
    missed += [f"{names[pid]} (pid {pid}) did not live to the end" for pid in sorted(there)]
    if len(looks) < SEEN_LIMIT * steps:
        missed.append(f"only {len(looks)} of {steps} steps were seen")
    return missed


def show(rows: Sequence[Row], seen: int) -> None:
    """Print the table."""
    table = Table(title=f"{seen} looks", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for title in ("process", "memory, MB", "growth", "private, MB", "files", "threads"):
        table.add_column(title, justify="left" if title == "process" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.memory_first:.1f} -> {row.memory_last:.1f}",
            f"{row.grew:+.1%}",
            f"{row.private:+.1f}",
            f"{row.files_first} -> {row.files_last}",
            f"{row.threads_first} -> {row.threads_last}",
        )
    Console(width=120, markup=False).print(table)


def report(
    rows: Sequence[Row],
    looks: Sequence[Look],
    missed: Sequence[str],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Return all figures, with the curve of each process."""
    curves = {
        row.name + f" ({row.pid})": [
            round(look.processes[row.pid].rss, 1) for look in looks if row.pid in look.processes
        ]
        for row in rows
    }
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processors": os.cpu_count(),
        "steps": arguments.steps,
        "warmup": arguments.warmup,
        "rollouts": arguments.rollouts,
        "looks": len(looks),
        "limits": {"growth": GROWTH_LIMIT, "files": FILES_LIMIT, "seen": SEEN_LIMIT},
        "missed": list(missed),
        "processes": [asdict(row) for row in rows],
        "rss_mb": curves,
    }


if __name__ == "__main__":
    sys.exit(main())
