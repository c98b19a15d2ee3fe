"""Kills the processes of real runs at the points of the protocols, and counts what is lost, repeated, hung or broken.

    uv run python tests/chaos/run.py --cases 100 --seed 1 --json chaos.json

Several cases follow each other in one run (docs/chaos.md). Exit code 1 if anything is wrong. The same number of cases
and seed draw the same cases; the instants at which they strike are those of the machine.
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

from prime_rl.supervisor.process import become_subreaper
from tests.chaos.cases import STEPS, Case, Plan, draw, together
from tests.chaos.check import Verdict, check
from tests.chaos.letters import skill
from tests.chaos.session import GROUP, SAMPLING_SEED, Outcome, Played, Session
from tests.support.tiny_model import make_tiny_model

REWARD_TOLERANCE = 0.06
"""Four standard errors of the mean of the last batches, whose groups differ where the bound lets them."""
_COMPARED_FROM = 20
"""Cases from which on undisturbed runs are made, too; below, the reward must be what the last versions give."""
_ROUNDS = 6
"""How often a case may be tried whose run was over before it came to the point."""


@dataclass
class Campaign:
    """What is known so far.

    Attributes:
        played: the cases.
        verdicts: of the runs, with what they were.
        problems: of the runs, in words.
        undisturbed: of the same settings without a kill.
    """

    played: list[Played] = field(default_factory=list)
    verdicts: list[tuple[Plan, Verdict]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    undisturbed: dict[bool, Verdict] = field(default_factory=dict)

    def compare(self) -> None:
        """Compare with the undisturbed runs: at k = 0 to the bit, else the final reward."""
        for plan, verdict in self.verdicts:
            if plan.engine != "contract" or not verdict.batches:
                continue
            calm = self.undisturbed.get(plan.filtered)
            if calm is not None and _is_exact(plan) and verdict.batches != calm.batches:
                verdict.broken.append("at k = 0 other batches than without kills")
            if calm is not None and _is_exact(plan) and verdict.weights != calm.weights:
                verdict.broken.append("at k = 0 other weights than without kills")
            due, found = calm.final_reward if calm else skill(STEPS), verdict.final_reward
            if due is None or found is None or abs(found - due) > REWARD_TOLERANCE:
                verdict.broken.append(f"final reward {found}, due is {due}")

    def summary(self) -> dict[str, Any]:
        """The figures, as `--json` writes them."""
        real = [p for p in self.played if p.case.number >= 0]
        outcomes = Counter(p.outcome for p in real)
        verdicts = [verdict for _, verdict in self.verdicts]
        detected = [s for p in real for s in p.detected_s]
        seconds = [p.seconds for p in real if p.outcome is Outcome.RECOVERED]
        calm = self.undisturbed.get(False)
        return {
            "cases": len(real),
            "kills": sum(p.kills for p in real),
            "recovered": outcomes[Outcome.RECOVERED],
            "lost": sum(len(v.lost) for v in verdicts),
            "repeated": sum(len(v.repeated) for v in verdicts),
            "hung": sum(problem.startswith("hung") for problem in self.problems),
            "bound_broken": sum(len(v.bound_broken) for v in verdicts),
            "broken": sum(len(v.broken) for v in verdicts),
            "unclear_errors": outcomes[Outcome.UNCLEAR],
            "gave_up": outcomes[Outcome.GAVE_UP],
            "missed": outcomes[Outcome.MISSED],
            "detected": len(detected),
            "detect_p50_s": _percentile(detected, 50),
            "detect_p99_s": _percentile(detected, 99),
            "recover_p50_s": _percentile(seconds, 50),
            "recover_max_s": _percentile(seconds, 100),
            "runs": len(self.verdicts),
            "identical_runs": sum(v.weights == self._calm_weights(p) for p, v in self.verdicts if _is_exact(p)),
            "final_reward_undisturbed": calm.final_reward if calm else None,
            "final_reward_worst": min(
                (v.final_reward for p, v in self.verdicts if p.engine == "contract" and v.final_reward), default=None
            ),
        }

    def ok(self, figures: dict[str, Any]) -> bool:
        """Whether nothing is wrong."""
        wrong = ("lost", "repeated", "hung", "bound_broken", "broken", "unclear_errors", "gave_up", "missed")
        return not any(figures[key] for key in wrong) and not self.problems

    def _calm_weights(self, plan: Plan) -> str | None:
        calm = self.undisturbed.get(plan.filtered)
        return calm.weights if calm else ""


class Runner:
    """Plays plans, some at once, each in a folder of its own."""

    def __init__(self, root: Path, jobs: int, deadline_s: float, keep: bool, console: Console) -> None:
        self.campaign = Campaign()
        self._root, self._jobs, self._deadline_s, self._keep, self._console = root, jobs, deadline_s, keep, console
        self._model = make_tiny_model(root / "model")
        self._lock = threading.Lock()
        self._runs = 0

    def play(self, plans: Sequence[Plan]) -> list[Case]:
        """Play plans; those without cases first, since others are compared with them.

        Returns:
            The cases that were missed.
        """
        with ThreadPoolExecutor(self._jobs) as pool:
            return [case for missed in pool.map(self._play, plans) for case in missed]

    def _play(self, plan: Plan) -> list[Case]:
        with self._lock:
            self._runs += 1
            root = self._root / f"run_{self._runs}"
        session = Session(plan, root, self._model, self._deadline_s)
        session.run()
        hung = any(played.outcome is Outcome.HUNG for played in session.played) or bool(session.problems)
        verdict = Verdict() if hung else check(session.paths, plan, GROUP, SAMPLING_SEED)
        missed = [played.case for played in session.played if played.outcome is Outcome.MISSED]
        with self._lock:
            self.campaign.played += [p for p in session.played if p.outcome is not Outcome.MISSED]
            self.campaign.problems += session.problems
            if plan.cases:
                self.campaign.verdicts.append((plan, verdict))
            else:
                self.campaign.undisturbed[plan.filtered] = verdict
            self._tell(session, verdict)
        clean = not verdict.problems and all(p.outcome is Outcome.RECOVERED for p in session.played)
        if clean and not self._keep:
            shutil.rmtree(root)
        return missed

    def _tell(self, session: Session, verdict: Verdict) -> None:
        plan = session.plan
        kind = "restarted by rl" if plan.restarts else "resumed"
        words = [plan.engine, kind, f"k = {plan.async_level}", *(["filtered"] if plan.filtered else [])]
        words += [f"{plan.ranks} ranks"] if plan.ranks > 1 else []
        self._console.print(f"{session.root.name}: {', '.join(words)}", style="bold")
        for played in session.played:
            detected = ", ".join(f"{seconds:.2f}" for seconds in played.detected_s) or "-"
            line = (
                f"  {played.outcome}: {played.case.name}; noticed after {detected} s, over after {played.seconds:.1f} s"
            )
            self._console.print(line + (f"; {played.why}" if played.why else ""), markup=False, soft_wrap=True)
        for problem in (*session.problems, *verdict.problems):
            self._console.print(f"  ! {problem} ({session.root})", markup=False, soft_wrap=True)


def _is_exact(plan: Plan) -> bool:
    return plan.engine == "contract" and plan.async_level == 0 and plan.ranks == 1


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 2) if values else None


def undisturbed(plans: Sequence[Plan]) -> list[Plan]:
    """The runs without kills that `plans` are compared with: at k = 0, where all is determined."""
    if sum(len(plan.cases) for plan in plans) < _COMPARED_FROM:
        return []
    kinds = sorted({plan.filtered for plan in plans if plan.engine == "contract"})
    return [Plan((), async_level=0, filtered=filtered) for filtered in kinds]


def print_table(figures: dict[str, Any], played: Sequence[Played], console: Console) -> None:
    """Print who was killed how often, then all figures."""
    table = Table("killed", "kills", "noticed after, s: median", "worst")
    victims = Counter(fault.killed for p in played for fault in p.case.faults[: p.kills])
    for victim, kills in sorted(victims.items()):
        seconds = [
            s for p in played for fault, s in zip(p.case.faults, p.detected_s, strict=False) if fault.killed == victim
        ]
        table.add_row(victim, str(kills), str(_percentile(seconds, 50)), str(_percentile(seconds, 100)))
    console.print(table)
    for name, value in figures.items():
        console.print(f"{name:26} {value}")


def _abandon(number: int, _: object) -> None:
    """End at once, with all that was started: threads that wait for a run would go on for minutes."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=1)
    os._exit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=8, help="how many; one in ten with the real server")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--deadline", type=float, default=120, help="longest time for a case, seconds; then it hangs")
    parser.add_argument("--only", default="", help="only points whose name contains this")
    parser.add_argument("--keep", action="store_true", help="keep the folders of runs without a problem, too")
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
    begun = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    runner = Runner(root, arguments.jobs, arguments.deadline, arguments.keep, console)
    todo = [*undisturbed(plans), *plans]
    for _ in range(_ROUNDS):
        missed = runner.play(todo)
        if not missed:
            break
        todo = [replace(plan, restarts=True) for plan in together(missed, plans[-1])]
    campaign = runner.campaign
    campaign.played += [Played(case, Outcome.MISSED) for case in missed]
    campaign.compare()
    figures = campaign.summary() | {"seed": arguments.seed, "seconds": round(time.monotonic() - begun)}
    print_table(figures, campaign.played, console)
    for _, verdict in campaign.verdicts:
        for problem in verdict.problems:
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
