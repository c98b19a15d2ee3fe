"""Cost of a staleness bound: event simulation of asynchronous RL policies on one seeded trace.

    uv run python benchmarks/simulation.py --json simulation.json --plot simulation.png
    uv run python benchmarks/simulation.py --windows --json windows.json    # length_aware_admission = 1, 4, 8

Our policies are the orchestrator's classes (`DeadlineScheduler`, `Lookahead`, `DurationHistory`, `DropPolicy`); others
follow their published rules (policies.py). The engine has slots that sample one rollout each at a constant rate, also
during weight switches. A group starts at the current version when its first rollout gets a slot. A training step takes
constant time. Lengths: pipeline_model.py.

Columns, medians over the seeds, after the warm-up batches:

    efficiency      max(t_train, t_infer) / t_step, times mean trained length / mean length of the trace, so that
                    training on short rollouts only does not count as efficient
    of t*           the same relative to t* = max(t_train, t_infer, (D_max + t_train + t_switch) / (bound + 1)), with k
                    if there is no bound; above 1 if the longest rollout of the trace, D_max, is rarer than one in
                    bound + 1 batches
    staleness       of trained tokens: maximum over all seeds, and mean of the groups' oldest tokens
    wasted          fraction of sampled tokens that were discarded to keep the bound
    length ratio    mean trained length / mean length of groups that started and were not dropped
"""

import argparse
import heapq
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from pipeline_model import Trace, Workload
from policies import (
    AdmissionGate,
    Discard,
    OneStepOff,
    Scheduler,
    ShipHold,
    StrictFifo,
    Synchronous,
    WindowedFifo,
)

from prime_rl.orchestrator.example_stream import DrawnExample
from prime_rl.orchestrator.group_filter import DropPolicy
from prime_rl.orchestrator.scheduler import DeadlineScheduler, DurationHistory, Lookahead

WORKLOADS = {
    "four waves": Workload(),
    "one wave, brutal tail": Workload(waves=1),
    "four waves, 30 % dropped": Workload(drop_share=0.3),
}


@dataclass(frozen=True)
class Policy:
    """One row of the table.

    Attributes:
        name: name of the policy.
        k: the policy's async level or bound.
        bound: m, the maximum staleness of the policy, or None.
        expectation: expected lengths for length-aware admission: `exact`, `history` of seconds, `tokens` (history of
            tokens), `noisy seconds` (history of seconds that are off by a factor e^(0.3 z)), or a number s for exact
            times e^(s z), with z standard normal; None admits in the order of the stream.
        oversampling: (B + admission credit) / B.
        batches: W, the batches of a window of length-aware admission.
    """

    name: str
    k: int
    bound: int | None
    expectation: str | float | None = None
    oversampling: float = 1.0
    batches: int = 1


MEASUREMENT_NOISE = 0.3

BASELINES: dict[str, Callable[[int, int], Scheduler]] = {
    "synchronous": Synchronous,
    "one_step_off": OneStepOff,
    "strict_fifo": StrictFifo,
    "windowed_fifo": WindowedFifo,
    "admission_gate": AdmissionGate,
    "ship_hold": ShipHold,
    "discard_stale": Discard,
}

WIDER_BOUNDS = ((1, 2), (2, 3), (2, 4))
"""(k, m): deadlines with a bound above the pace."""

OVERSAMPLING = 1.5


class Simulation:
    """One run of a policy over a trace: the orchestrator's loop between an engine with slots and a trainer."""

    def __init__(self, trace: Trace, policy: Policy) -> None:
        self.trace = trace
        self.workload = trace.workload
        self.scheduler = make_scheduler(policy, self.workload)
        self.history = DurationHistory()
        stream = trace.draws()
        self.lookahead = Lookahead(
            lambda: next(stream),
            expectation(policy.expectation, trace, self.history),
            0 if policy.expectation is None else policy.batches * self.workload.batch_groups,
            self.workload.steps * self.workload.batch_groups,
        )
        self._noise = MEASUREMENT_NOISE if policy.expectation == "noisy seconds" else 0.0
        self._counts_tokens = policy.expectation == "tokens"
        self.drops = DropPolicy(self.workload.batch_groups, policy.oversampling)
        self.now = 0.0
        self.version = 0
        self.training = False
        self.shipped: list[list[int]] = []
        self.step_ends: list[float] = []
        self.draws: dict[int, DrawnExample] = {}
        self.versions: dict[int, int] = {}
        self.staleness: list[list[int]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._free_slots = self.workload.slots
        self._waiting: list[tuple[int, float]] = []
        self._left: dict[int, int] = {}

    def run(self) -> None:
        """Train all steps; raise RuntimeError on a deadlock."""
        while len(self.step_ends) < self.workload.steps:
            self._ship()
            self._start()
            if not self._events:
                raise RuntimeError(f"deadlock before batch {self.scheduler.next_step}")
            self.now, _, happen = heapq.heappop(self._events)
            happen()

    def _at(self, seconds: float, happen: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, happen))

    def _ship(self) -> None:
        while self.scheduler.next_step < self.workload.steps and (batch := self.scheduler.ready()) is not None:
            step = self.scheduler.next_step
            self.staleness.append([step - self.versions[group_id] for group_id in batch])
            self.shipped.append(list(batch))
            self.scheduler.ship(batch)
            self.drops.start_batch()
        if not self.training and len(self.shipped) > len(self.step_ends):
            self.training = True
            self._at(self.workload.t_train, self._end_step)

    def _end_step(self) -> None:
        self.training = False
        self.step_ends.append(self.now)
        version = len(self.step_ends)
        self._at(self.workload.t_switch, lambda: setattr(self, "version", version))

    def _start(self) -> None:
        """Fill the free slots with the rollouts of the last group, then with new groups while the policy allows."""
        while self._free_slots:
            if not self._waiting and not self._admit():
                return
            group_id, seconds = self._waiting.pop()
            self._free_slots -= 1
            self._at(seconds, lambda group_id=group_id: self._end_rollout(group_id))

    def _admit(self) -> bool:
        if isinstance(self.scheduler, DeadlineScheduler) and self.scheduler.async_level:
            self.scheduler.credit = self.drops.credit(self.scheduler.in_flight)
        if not self.scheduler.can_admit(self.version):
            return False
        draw = self.lookahead.next(self.scheduler.placed)
        self.scheduler.admit(draw.group_id, self.version)
        self.draws[draw.group_id] = draw
        self.versions[draw.group_id] = self.version
        seconds = self.trace.seconds(draw).tolist()
        self._left[draw.group_id] = len(seconds)
        self._waiting = [(draw.group_id, s) for s in seconds]
        return True

    def _end_rollout(self, group_id: int) -> None:
        self._free_slots += 1
        self._left[group_id] -= 1
        if self._left[group_id]:
            return
        draw = self.draws[group_id]
        noise = np.exp(self._noise * self.trace.error(draw))
        measured = self.trace.lengths(draw) if self._counts_tokens else self.trace.seconds(draw) * noise
        self.history.add(Trace.ENVIRONMENT, draw.example, float(measured.max()))
        if self.trace.is_dropped(draw):
            self.drops.record_filtered(zero_advantage=True)
            self.scheduler.drop(group_id)
        else:
            self.drops.record_kept()
            self.scheduler.complete(group_id)


def make_scheduler(policy: Policy, workload: Workload) -> Scheduler:
    """Return the policy's scheduler before batch 0."""
    if policy.name.startswith("deadline"):
        return DeadlineScheduler(workload.batch_groups, policy.k, workload.steps, max_off_policy_steps=policy.bound)
    return BASELINES[policy.name](workload.batch_groups, policy.k)


def expectation(
    kind: str | float | None, trace: Trace, history: DurationHistory
) -> Callable[[DrawnExample], float | None]:
    """Return the expected length of a group for length-aware admission."""
    if kind in ("history", "tokens", "noisy seconds"):
        return lambda draw: history.expected(Trace.ENVIRONMENT, draw.example)
    error = 0.0 if kind in (None, "exact") else float(kind)
    return lambda draw: float(trace.seconds(draw).max()) * float(np.exp(error * trace.error(draw)))


def figures(run: Simulation, policy: Policy) -> dict[str, float]:
    """Return the columns of a finished run."""
    trace, work = run.trace, run.workload
    tokens = {group_id: trace.lengths(draw) for group_id, draw in run.draws.items()}
    trained = [float(np.mean([tokens[group_id] for group_id in batch])) for batch in run.shipped[: work.steps]]
    t_step = (run.step_ends[-1] - run.step_ends[work.warmup_steps - 1]) / (work.steps - work.warmup_steps)
    efficiency = trace.ideal() / t_step * statistics.fmean(trained[work.warmup_steps :]) / trace.mean_tokens
    started = [tokens[group_id] for group_id, draw in run.draws.items() if not trace.is_dropped(draw)]
    wasted = sum(int(tokens[group_id].sum()) for group_id in getattr(run.scheduler, "discarded", ()))
    sampled = sum(trained) * work.batch_groups * work.group_size + wasted
    return {
        "efficiency": efficiency,
        "efficiency_of_limit": efficiency
        * trace.limit(policy.k if policy.bound is None else policy.bound)
        / trace.ideal(),
        "staleness_max": max(max(batch) for batch in run.staleness),
        "staleness_mean": statistics.fmean(age for batch in run.staleness[work.warmup_steps :] for age in batch),
        "tokens_wasted": wasted / sampled,
        "length_ratio": statistics.fmean(trained) / float(np.mean(started)),
    }


def policies(workload: Workload, levels: Sequence[int]) -> list[Policy]:
    """Return the rows of a workload's table."""
    rows = [Policy("synchronous", 0, 0), Policy("one_step_off", 1, 1), Policy("ship_hold", 8, 8)]
    expectations: list[str | float] = ["history"]
    if workload.waves > 1 and not workload.drop_share:
        expectations += ["exact", 0.5, 1.0]
    for k in [k for k in levels if k <= 2 or not workload.drop_share]:
        bounds = {
            "strict_fifo": k,
            "windowed_fifo": WindowedFifo(workload.batch_groups, k).bound,
            "admission_gate": None,
            "discard_stale": k,
        }
        rows += [Policy(name, k, bound) for name, bound in bounds.items()]
        rows += [Policy("deadline", k, k)]
        rows += [Policy("deadline_length_aware", k, k, kind) for kind in expectations]
    for k, bound in WIDER_BOUNDS:
        rows += [Policy("deadline", k, bound)]
        if workload.drop_share:
            rows += [Policy("deadline", k, bound, oversampling=OVERSAMPLING)]
    return rows


WINDOWED_WORKLOADS = {
    "one wave, brutal tail": Workload(waves=1),
    "four waves": Workload(),
    "one wave, environments wait": Workload(waves=1, wait=1.0),
    "one wave, environments wait three times as long": Workload(waves=1, wait=3.0),
}


def windowed_policies(workload: Workload, levels: Sequence[int]) -> list[Policy]:
    """Return length-aware admission over several batches; with waits, also what the lengths may be counted in."""
    kinds = ("history", "exact", "tokens", "noisy seconds") if workload.wait else ("history", "exact", "noisy seconds")
    return [
        policy
        for k in (levels if workload.waves == 1 and not workload.wait else [2])
        for policy in [
            Policy("deadline", k, k),
            *(Policy("deadline_length_aware", k, k, kind, batches=w) for kind in kinds for w in (1, 4, 8)),
        ]
    ]


@cache
def make_trace(workload: Workload, seed: int) -> Trace:
    """Return the trace, cached for several policies."""
    return Trace(workload, seed)


def measure(job: tuple[Workload, Policy, int]) -> dict[str, float]:
    """Run one policy over one trace."""
    workload, policy, seed = job
    run = Simulation(make_trace(workload, seed), policy)
    run.run()
    return figures(run, policy)


def median_row(workload: str, policy: Policy, runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return a row of the table: medians over the seeds, and the maximum staleness."""
    settings = asdict(policy)
    row: dict[str, Any] = {"workload": workload, "policy": settings.pop("name"), **settings}
    row |= {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}
    row["staleness_max"] = max(int(run["staleness_max"]) for run in runs)
    return row


def rows(
    workloads: dict[str, Workload],
    levels: Sequence[int],
    seeds: Sequence[int],
    choose: Callable[[Workload, Sequence[int]], list[Policy]] = policies,
) -> list[dict[str, Any]]:
    """Run all policies on all processors and return the table."""
    keys = [(name, policy) for name, workload in workloads.items() for policy in choose(workload, levels)]
    jobs = [(workloads[name], policy, seed) for seed in seeds for name, policy in keys]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        runs = list(pool.map(measure, jobs, chunksize=max(1, len(keys) // 4)))
    return [median_row(*key, runs[index :: len(keys)]) for index, key in enumerate(keys)]


HEADER = (
    "| policy | k | bound | efficiency | of t* | staleness max | mean | wasted | length ratio |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def table_row(row: dict[str, Any]) -> str:
    """Format a row of the table in Markdown."""
    name = row["policy"]
    if row["expectation"] is not None:
        kind = row["expectation"]
        name += f" ({kind if isinstance(kind, str) else f'exact, off by e^{kind:g}'})"
        name += f", W = {row['batches']}" if row["batches"] > 1 else ""
    if row["oversampling"] > 1:
        name += f" (oversampling {row['oversampling']:g})"
    bound = "none" if row["bound"] is None else row["bound"]
    cells = [name, row["k"], bound, f"{row['efficiency']:.3f}", f"{row['efficiency_of_limit']:.3f}"]
    cells += [row["staleness_max"], f"{row['staleness_mean']:.2f}", f"{row['tokens_wasted']:.1%}"]
    return "| " + " | ".join(map(str, [*cells, f"{row['length_ratio']:.3f}"])) + " |"


def print_tables(table: Sequence[dict[str, Any]]) -> None:
    for workload, of_workload in groupby(table, key=lambda row: row["workload"]):
        print(f"\n### {workload[0].upper()}{workload[1:]}\n\n{HEADER}")
        for row in of_workload:
            print(table_row(row))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--async-levels", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seeds", type=int, default=5, help="number of traces")
    parser.add_argument("--steps", type=int, default=Workload.steps, help="batches; the first fifth is the warm-up")
    parser.add_argument("--windows", action="store_true", help="compare the windows of length-aware admission instead")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--plot", type=Path, help="plot efficiency over staleness to this file (.png, .svg)")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    sizes = {"steps": arguments.steps, "warmup_steps": max(1, arguments.steps // 5)}
    named, choose = (WINDOWED_WORKLOADS, windowed_policies) if arguments.windows else (WORKLOADS, policies)
    workloads = {name: replace(workload, **sizes) for name, workload in named.items()}
    table = rows(workloads, arguments.async_levels, range(arguments.seeds), choose)
    print_tables(table)
    for path in filter(None, (arguments.json, arguments.plot)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1) + "\n")
    if arguments.plot:
        from simulation_plot import draw_plot

        draw_plot(table, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
