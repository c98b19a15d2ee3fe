"""Policies on one seeded trace through the real orchestrator, compared with the simulation.

    uv run python benchmarks/pipeline.py --json benchmarks/results/pipeline.json

Each policy has an orchestrator with real environment workers, ledger, batches, metrics and HTTP. Server and trainer
have no model and take the times of the trace (replay/engine.py). Our policy is the unchanged orchestrator; the others
(policies.py) replace its scheduler. All run concurrently on the same processors, the others at half the pace with half
the batches. No GPU; six minutes on two cores.

Four waves: 32 groups of 8, 64 slots, lognormal lengths, t_train = t_infer = 5 s.

efficiency      max(t_train, t_infer) / t_step, times mean trained length / mean length of the trace
of t*           the same relative to t*, see simulation.py
simulated       efficiency by simulation.py on the same trace, and the ratio of both
staleness       maximum over trained tokens, as reported by the server; mean over groups of the oldest token
wasted          fraction of sampled tokens that were discarded to keep the bound
length ratio    mean trained length / mean started length
switch          milliseconds from the end of a step to the acknowledgement of its version, median
lag             event loop lag of the orchestrator, milliseconds: 99th percentile, median over batches

The first steps are not measured. `--json FILE` writes the rows with date, number of processors, and the load of the
benchmark and of other processes, in cores.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import psutil
from overhead.material import make_tokenizer
from pipeline_model import Trace, Workload
from replay.spec import RECORD, Spec, replayed_tokens
from rich.console import Console
from rich.table import Table
from simulation import Policy, Simulation, figures

from prime_rl.orchestrator.example_stream import DrawnExample
from prime_rl.storage.batch import read_batch
from prime_rl.storage.paths import RunPaths

HERE = Path(__file__).parent

OURS = [
    Policy("deadline", 1, 1),
    Policy("deadline", 2, 2),
    Policy("deadline", 4, 4),
    Policy("deadline_length_aware", 1, 1, "history"),
    Policy("deadline_length_aware", 2, 2, "history"),
    Policy("deadline_length_aware", 4, 4, "history"),
]
OTHERS = [
    Policy("strict_fifo", 2, 2),
    Policy("admission_gate", 2, None),
    Policy("discard_stale", 2, 2),
    Policy("ship_hold", 8, 8),
]
SYNCHRONOUS = Policy("synchronous", 0, 0)
QUICK_POLICIES = [OURS[0], OURS[4], OTHERS[2]]
DEFAULT = Workload(steps=40, warmup_steps=10, t_infer=5.0, t_train=5.0, t_switch=0.05)
QUICK = Workload(
    batch_groups=4, group_size=4, steps=8, warmup_steps=2, t_infer=0.5, t_train=0.5, t_switch=0.01, examples=16
)
SYNCHRONOUS_SHARE = 3
"""A synchronous step takes three times as long, so a third of the steps fill the time."""

STARTS = 2
"""Runs that start at once."""


@dataclass
class Replay:
    """The results of one run, in the form of `simulation.figures`.

    Attributes:
        trace: the replayed trace.
        draws: started groups.
        shipped: groups of each batch.
        staleness: staleness of the oldest token of each group, batch by batch.
        step_ends: end of each training step, seconds.
        rows: lines of metrics/orchestrator.jsonl.
        switch_seconds: seconds from the end of a step to the server's switch.
        ship_seconds: seconds from the last rollout of a batch until the trainer reads the batch.
    """

    trace: Trace
    draws: dict[int, DrawnExample] = field(default_factory=dict)
    shipped: list[list[int]] = field(default_factory=list)
    staleness: list[list[int]] = field(default_factory=list)
    step_ends: list[float] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    switch_seconds: list[float] = field(default_factory=list)
    ship_seconds: list[float] = field(default_factory=list)
    scheduler: Any = field(default_factory=SimpleNamespace)

    @property
    def workload(self) -> Workload:
        """Return the trace's workload."""
        return self.trace.workload


def read_replay(spec: Spec) -> Replay:
    """Read the files of a finished run; raise AssertionError if it did not replay the trace."""
    paths, replay = RunPaths(spec.root), Replay(spec.trace)
    record = json.loads((spec.root / RECORD).read_text())
    replay.step_ends = record["step_ends"]
    stream = replay.trace.draws()
    drawn: dict[int, DrawnExample] = {}
    for line in paths.ledger(0).read_text().splitlines()[1:]:
        entry = json.loads(line)
        if entry["record"] == "drawn":
            draw = drawn[entry["group_id"]] = next(stream)
            assert (draw.group_id, draw.example) == (entry["group_id"], entry["example"]), "another stream"
        elif entry["record"] == "issued":
            replay.draws[entry["group_id"]] = drawn[entry["group_id"]]
    answers = dict(record["answers"])
    for step in range(spec.workload.steps):
        batch, manifest = read_batch(paths.rollouts(step), step)
        group_ids = manifest["group_ids"]
        tokens = [replayed_tokens(n) for g in group_ids for n in replay.trace.lengths(drawn[g]).tolist()]
        assert batch.loss_mask.sum() == sum(tokens), f"batch {step} has other lengths than the trace"
        oldest: dict[int, int] = dict.fromkeys(group_ids, step)
        starts = batch.seq_lens.cumsum() - batch.seq_lens
        for group_id, start, length in zip(batch.sample_group.tolist(), starts, batch.seq_lens, strict=True):
            versions = batch.versions[start : start + length]
            oldest[group_id] = min(oldest[group_id], int(versions[versions >= 0].min()))
        replay.shipped.append(group_ids)
        replay.staleness.append([step - version for version in oldest.values()])
        replay.ship_seconds.append(record["arrivals"][step] - max(answers[group_id] for group_id in group_ids))
    ends = dict(enumerate(replay.step_ends, 1))
    replay.switch_seconds = [at - ends[version] for at, version in record["switches"] if version]
    replay.rows = [json.loads(line) for line in paths.metrics("orchestrator").read_text().splitlines()]
    return replay


def row_of(spec: Spec) -> dict[str, Any]:
    """Return a row of the table."""
    replay, simulation = read_replay(spec), Simulation(spec.trace, spec.policy)
    simulation.run()
    measured, promised = figures(replay, spec.policy), figures(simulation, spec.policy)  # type: ignore[arg-type]
    last, warmup = replay.rows[-1], spec.workload.warmup_steps
    measured["tokens_wasted"] = (last["tokens/unaccounted"] + last["tokens/dropped"]) / last["tokens/sampled"]
    measured |= {
        "simulated": promised["efficiency"],
        "of_simulated": measured["efficiency"] / promised["efficiency"],
        "switch_ms": 1000 * median(replay.switch_seconds[warmup:]),
        "ship_ms": 1000 * median(replay.ship_seconds[warmup:]),
        "lag_p99_ms": 1000 * median(r["event_loop_lag/p99"] for r in replay.rows[warmup:] if "event_loop_lag/p99" in r),
    }
    rounded = {name: round(value, 4) for name, value in measured.items()}
    return {"policy": spec.policy.name, "k": spec.policy.k, "bound": spec.policy.bound, **rounded}


@asynccontextmanager
async def process(spec: Spec, module: str, *arguments: str) -> Any:
    """Start a process of a run; its output, except the protocol, is written to the run's logs."""
    path = os.pathsep.join([str(HERE), str(HERE / "replay/environments")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, str(spec.root), *arguments]
    with (spec.root / f"{module}.log").open("wb") as log:
        started = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=log, env=environment)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def line_of(started: Process, spec: Spec) -> str:
    """Read a line of a process, or exit with its log."""
    assert started.stdout is not None
    line = (await started.stdout.readline()).decode().strip()
    if not line:
        logs = "\n".join(path.read_text()[-3000:] for path in spec.root.glob("*.log"))
        raise SystemExit(f"{spec.root.name}: a process exited early\n{logs}")
    return line


async def play(specs: Sequence[Spec], tokenizer: Path) -> dict[str, float]:
    """Run all specifications concurrently; return the processor load."""
    async with AsyncExitStack() as stack:
        room = asyncio.Semaphore(STARTS)

        async def start(spec: Spec) -> Process:
            async with room:
                return await start_now(spec)

        async def start_now(spec: Spec) -> Process:
            spec.write()
            engine = await stack.enter_async_context(process(spec, "replay.engine"))
            url = f"http://127.0.0.1:{await line_of(engine, spec)}"
            started: Process = await stack.enter_async_context(
                process(spec, "replay.orchestrator", url, str(tokenizer))
            )
            await line_of(started, spec)
            return started

        started = await asyncio.gather(*map(start, specs))
        began, busy = time.monotonic(), busy_seconds()
        for one in started:
            assert one.stdin is not None
            one.stdin.write(b"go\n")
        spent = await asyncio.gather(*(line_of(one, spec) for one, spec in zip(started, specs, strict=True)))
        elapsed, busy = time.monotonic() - began, busy_seconds() - busy
    engines = [json.loads((spec.root / RECORD).read_text())["cpu_s"] for spec in specs]
    own = sum(map(float, spent)) + sum(engines)
    return {
        "seconds": round(elapsed), "load_own": round(own / elapsed, 2),
        "load_others": round(max(0.0, busy - own) / elapsed, 2),
    }  # fmt: skip


def busy_seconds() -> float:
    """Return the busy seconds of the machine's processors."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "steal", 0.0)


COLUMNS = {
    "efficiency": "{:.3f}",
    "efficiency_of_limit": "{:.3f}",
    "simulated": "{:.3f}",
    "of_simulated": "{:.3f}",
    "staleness_max": "{}",
    "staleness_mean": "{:.2f}",
    "tokens_wasted": "{:.1%}",
    "length_ratio": "{:.3f}",
    "ship_ms": "{:.0f}",
    "switch_ms": "{:.0f}",
    "lag_p99_ms": "{:.0f}",
}


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("policy", "k", *(name.replace("_", " ") for name in COLUMNS))
    for row in rows:
        cells = [form.format(row[name]) for name, form in COLUMNS.items()]
        table.add_row(row["policy"], str(row["k"]), *cells)
    Console(width=200).print(table)
    first = rows[0]
    print(
        f"{first['seconds']} s on {first['processors']} processors, {first['date']}; load in cores: own "
        f"{first['load_own']}, others {first['load_others']}"
    )


def slower(workload: Workload, factor: float, steps: float) -> Workload:
    """Return the workload at another pace, with a fraction of the steps."""
    return replace(
        workload, steps=max(2, int(workload.steps * steps)), warmup_steps=max(1, int(workload.warmup_steps * steps)),
        t_infer=workload.t_infer * factor, t_train=workload.t_train * factor, t_switch=workload.t_switch * factor,
    )  # fmt: skip


def specifications(root: Path, arguments: argparse.Namespace) -> list[Spec]:
    """Return the specifications of all runs."""
    workload = QUICK if arguments.quick else replace(DEFAULT, steps=arguments.steps)
    paces = {
        **dict.fromkeys(OURS, workload),
        **{policy: slower(workload, 2, 1 / 2) for policy in OTHERS},
        SYNCHRONOUS: slower(workload, 1, 1 / SYNCHRONOUS_SHARE),
    }
    chosen = QUICK_POLICIES if arguments.quick else list(paces)
    if arguments.policy:
        chosen = [policy for policy in paces if f"{policy.name}:{policy.k}" in arguments.policy]
    return [Spec(policy, paces[policy], arguments.seed, root / f"{policy.name}_{policy.k}") for policy in chosen]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="a few small batches, as a test of the script")
    parser.add_argument("--policy", action="append", help="only this policy, as name:k; can be repeated")
    parser.add_argument("--steps", type=int, default=DEFAULT.steps, help="batches; the first ten are not measured")
    parser.add_argument("--seed", type=int, default=0, help="of the trace")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        specs = specifications(Path(name), arguments)
        make_tokenizer(Path(name) / "tokenizer")
        machine = {"date": datetime.now(UTC).date().isoformat(), "processors": os.cpu_count()}
        machine |= asyncio.run(play(specs, Path(name) / "tokenizer"))
        rows = [{**row_of(spec), **machine} for spec in specs]
    print_table(rows)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
