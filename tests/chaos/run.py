"""Kills the processes of real runs at the points of the protocols, and counts lost, repeated, hung and broken work.

    uv run python tests/chaos/run.py --cases 100 --seed 1 --json chaos.json

A run contains several consecutive cases (docs/design/recovery.md). Exits with 1 if there is a problem. Equal
numbers of cases and equal seeds draw equal cases; the times of the faults depend on the machine.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from prime_rl.liveness.parent_process import become_subreaper
from tests.chaos.cases import STEPS, Case, Plan, draw, group_into_plans
from tests.chaos.check import CheckResult, check
from tests.chaos.letters import skill
from tests.chaos.session import GROUP, SAMPLING_SEED, CaseResult, Outcome, Session
from tests.support.tiny_model import make_tiny_model

REWARD_TOLERANCE = 0.06
"""Four standard errors of the mean of the last batches, whose groups can differ within the bound."""
_COMPARED_FROM = 20
"""Smallest number of cases with reference runs; with fewer, the reward is compared with that of the last versions."""
_ROUNDS = 6
"""How often a case is tried whose run ends before it reaches the point."""


@dataclass
class Campaign:
    """Results so far.

    Attributes:
        results: of the cases.
        checks: of the runs, with their plans.
        problems: of the runs, in words.
        references: checks of the runs without faults, by `filtered`.
    """

    results: list[CaseResult] = field(default_factory=list)
    checks: list[tuple[Plan, CheckResult]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    references: dict[bool, CheckResult] = field(default_factory=dict)

    def compare(self) -> None:
        """Compare with the reference runs: bit by bit at k = 0, otherwise the final reward."""
        for plan, check_result in self.checks:
            if plan.engine != "contract" or not check_result.batches:
                continue
            reference = self.references.get(plan.filtered)
            if reference is not None and _is_exact(plan) and check_result.batches != reference.batches:
                check_result.broken.append("at k = 0 batches differ from those without kills")
            if reference is not None and _is_exact(plan) and check_result.weights != reference.weights:
                check_result.broken.append("at k = 0 weights differ from those without kills")
            due, found = reference.final_reward if reference else skill(STEPS), check_result.final_reward
            if due is None or found is None or abs(found - due) > REWARD_TOLERANCE:
                check_result.broken.append(f"final reward {found}, expected {due}")

    def summary(self) -> dict[str, Any]:
        """The figures that `--json` writes."""
        real = [p for p in self.results if p.case.number >= 0]
        outcomes = Counter(p.outcome for p in real)
        checks = [check_result for _, check_result in self.checks]
        detected = [s for p in real for s in p.detected_seconds]
        seconds = [p.seconds for p in real if p.outcome is Outcome.RECOVERED]
        reference = self.references.get(False)
        return {
            "cases": len(real),
            "kills": sum(p.kills for p in real),
            "recovered": outcomes[Outcome.RECOVERED],
            "lost": sum(len(v.lost) for v in checks),
            "repeated": sum(len(v.repeated) for v in checks),
            "hung": sum(problem.startswith("hung") for problem in self.problems),
            "bound_broken": sum(len(v.bound_broken) for v in checks),
            "broken": sum(len(v.broken) for v in checks),
            "unclear_errors": outcomes[Outcome.UNCLEAR],
            "gave_up": outcomes[Outcome.GAVE_UP],
            "missed": outcomes[Outcome.MISSED],
            "detected": len(detected),
            "detect_p50_s": _percentile(detected, 50),
            "detect_p99_s": _percentile(detected, 99),
            "recover_p50_s": _percentile(seconds, 50),
            "recover_max_s": _percentile(seconds, 100),
            "runs": len(self.checks),
            "identical_runs": sum(v.weights == self._reference_weights(p) for p, v in self.checks if _is_exact(p)),
            "final_reward_undisturbed": reference.final_reward if reference else None,
            "final_reward_worst": min(
                (v.final_reward for p, v in self.checks if p.engine == "contract" and v.final_reward), default=None
            ),
        }

    def ok(self, figures: dict[str, Any]) -> bool:
        """Whether there is no problem."""
        wrong = ("lost", "repeated", "hung", "bound_broken", "broken", "unclear_errors", "gave_up", "missed")
        return not any(figures[key] for key in wrong) and not self.problems

    def _reference_weights(self, plan: Plan) -> str | None:
        reference = self.references.get(plan.filtered)
        return reference.weights if reference else ""


class Runner:
    """Runs plans, several at once, each in a separate folder."""

    def __init__(self, root: Path, jobs: int, deadline_seconds: float, keep: bool, console: Console) -> None:
        self.campaign = Campaign()
        self._root, self._jobs, self._deadline_seconds, self._keep, self._console = (
            root,
            jobs,
            deadline_seconds,
            keep,
            console,
        )
        self._model = make_tiny_model(root / "model")
        self._lock = threading.Lock()
        self._runs = 0

    def run(self, plans: Sequence[Plan]) -> list[Case]:
        """Run plans. Those without cases come first, because the others are compared with them.

        Returns:
            The cases whose run ended too early.
        """
        with ThreadPoolExecutor(self._jobs) as pool:
            return [case for missed in pool.map(self._run_plan, plans) for case in missed]

    def _run_plan(self, plan: Plan) -> list[Case]:
        with self._lock:
            self._runs += 1
            root = self._root / f"run_{self._runs}"
        session = Session(plan, root, self._model, self._deadline_seconds)
        session.run()
        hung = any(result.outcome is Outcome.HUNG for result in session.results) or bool(session.problems)
        check_result = CheckResult() if hung else check(session.paths, plan, GROUP, SAMPLING_SEED)
        missed = [result.case for result in session.results if result.outcome is Outcome.MISSED]
        with self._lock:
            self.campaign.results += [p for p in session.results if p.outcome is not Outcome.MISSED]
            self.campaign.problems += session.problems
            if plan.cases:
                self.campaign.checks.append((plan, check_result))
            else:
                self.campaign.references[plan.filtered] = check_result
            self._print(session, check_result)
        clean = not check_result.problems and all(p.outcome is Outcome.RECOVERED for p in session.results)
        if clean and not self._keep:
            shutil.rmtree(root)
        return missed

    def _print(self, session: Session, check_result: CheckResult) -> None:
        plan = session.plan
        kind = "restarted by rl" if plan.restarts else "resumed"
        words = [plan.engine, kind, f"k = {plan.async_level}", *(["filtered"] if plan.filtered else [])]
        words += [f"{plan.ranks} ranks"] if plan.ranks > 1 else []
        self._console.print(f"{session.root.name}: {', '.join(words)}", style="bold")
        for result in session.results:
            detected = ", ".join(f"{seconds:.2f}" for seconds in result.detected_seconds) or "-"
            line = f"  {result.outcome}: {result.case.name}; detected after {detected} s, "
            line += f"recovered after {result.seconds:.1f} s"
            self._console.print(line + (f"; {result.why}" if result.why else ""), markup=False, soft_wrap=True)
        for problem in (*session.problems, *check_result.problems):
            self._console.print(f"  ! {problem} ({session.root})", markup=False, soft_wrap=True)


def _is_exact(plan: Plan) -> bool:
    return plan.engine == "contract" and plan.async_level == 0 and plan.ranks == 1


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 2) if values else None


def reference_plans(plans: Sequence[Plan]) -> list[Plan]:
    """The runs without kills that `plans` are compared with, at k = 0, where they are deterministic."""
    if sum(len(plan.cases) for plan in plans) < _COMPARED_FROM:
        return []
    kinds = sorted({plan.filtered for plan in plans if plan.engine == "contract"})
    return [Plan((), async_level=0, filtered=filtered) for filtered in kinds]


def print_table(figures: dict[str, Any], results: Sequence[CaseResult], console: Console) -> None:
    """Print the kills per process, then all figures."""
    table = Table("killed", "kills", "detected after, s: median", "worst")
    victims = Counter(fault.killed for p in results for fault in p.case.faults[: p.kills])
    for victim, kills in sorted(victims.items()):
        seconds = [
            s
            for p in results
            for fault, s in zip(p.case.faults, p.detected_seconds, strict=False)
            if fault.killed == victim
        ]
        table.add_row(victim, str(kills), str(_percentile(seconds, 50)), str(_percentile(seconds, 100)))
    console.print(table)
    for name, value in figures.items():
        console.print(f"{name:26} {value}")


def _abandon(number: int, _: object) -> None:
    """Exit at once and kill all children: threads that wait for a run would continue for minutes."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=1)
    os._exit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=8, help="number of cases; one in ten uses the real server")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel runs")
    parser.add_argument("--deadline", type=float, default=300, help="seconds after which a case counts as hung")
    parser.add_argument("--only", default="", help="only points whose name contains this")
    parser.add_argument("--keep", action="store_true", help="also keep the folders of runs without a problem")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    try:
        plans = draw(arguments.cases, arguments.seed, arguments.only)
    except ValueError as error:
        parser.error(str(error))
    console = Console(highlight=False)
    become_subreaper()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _abandon)
    started = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    runner = Runner(root, arguments.jobs, arguments.deadline, arguments.keep, console)
    todo = [*reference_plans(plans), *plans]
    for _ in range(_ROUNDS):
        missed = runner.run(todo)
        if not missed:
            break
        todo = [replace(plan, restarts=True) for plan in group_into_plans(missed, plans[-1])]
    campaign = runner.campaign
    campaign.results += [CaseResult(case, Outcome.MISSED) for case in missed]
    campaign.compare()
    figures = campaign.summary() | {"seed": arguments.seed, "seconds": round(time.monotonic() - started)}
    print_table(figures, campaign.results, console)
    for _, check_result in campaign.checks:
        for problem in check_result.problems:
            console.print(f"! {problem}", markup=False, soft_wrap=True)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    ok = campaign.ok(figures)
    if ok and not arguments.keep:
        shutil.rmtree(root)
    else:
        console.print(f"runs are kept in {root}")
    sys.exit(not ok)


if __name__ == "__main__":
    main()
