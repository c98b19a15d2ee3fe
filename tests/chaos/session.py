"""One run with repeated faults: kill, wait until it has recovered or ended, start it again, continue.

A case begins when its first fault is armed and ends when the trainer has done more steps than before the kill. One
deadline bounds the waits of a case; after it the case counts as hung, and all processes of the run are killed.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from prime_rl.storage.checkpoint_artifacts import read_resume
from prime_rl.storage.paths import RunPaths, steps_in
from tests.chaos.cases import INTERVAL, STEPS, Case, Fault, Plan
from tests.support.command import alive, clean_environment, executable, json_lines
from tests.support.server import free_port

HERE = Path(__file__).parent
BATCH_SIZE, GROUP = 8, 2
SAMPLING_SEED = 7
MANY_RESTARTS = 8
WAIT_SECONDS = 300.0  # a server takes long to start
_POLL_SECONDS = 0.05
_LEFTOVERS_SECONDS = 60.0
_NOTICE_SECONDS = 5.0
_STARTS = 4
"""How often a run may be restarted in one case."""


class Outcome(StrEnum):
    """How a case ended."""

    RECOVERED = "recovered"
    MISSED = "missed"
    """The run ended before it reached the point: no kill."""
    GAVE_UP = "gave up"
    """`rl` exited although it has restarts left."""
    UNCLEAR = "unclear error"
    """`rl` exited without exactly one line that begins with `error:`."""
    HUNG = "hung"


@dataclass
class CaseResult:
    """Result of a case.

    Attributes:
        case: the case.
        outcome: how it ended.
        kills: number of kills.
        detected_seconds: seconds from each kill until it was detected, where that is reported.
        seconds: from the last kill until the whole run made progress.
        why: explanation, if there is one.
    """

    case: Case
    outcome: Outcome = Outcome.RECOVERED
    kills: int = 0
    detected_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0
    why: str = ""


class _Hung(Exception):
    """The deadline of a case has passed; the message names the condition."""


class _Finished(Exception):
    """The run ended with exit code 0."""


class Session:
    """A run directory and its `rl`."""

    def __init__(self, plan: Plan, root: Path, model: Path, deadline_seconds: float) -> None:
        """Prepare without starting anything.

        Args:
            plan: what to do.
            root: folder of the session, which does not exist.
            model: to train.
            deadline_seconds: longest time for a case.
        """
        self.plan, self.root, self.paths = plan, root, RunPaths(root / "run")
        self.results: list[CaseResult] = []
        self.problems: list[str] = []
        self._deadline_seconds, self._deadline = deadline_seconds, 0.0
        self._chaos = root / "chaos"
        self._chaos.mkdir(parents=True)
        self._file = root / "rl.toml"
        self._file.write_text(tomli_w.dumps(settings(plan, self.paths.root, model)))
        self._environment = clean_environment() | {
            "PYTHONPATH": os.pathsep.join([f"{HERE}/hook", f"{HERE}/environments", os.environ.get("PYTHONPATH", "")]),
            "CHAOS_DIR": str(self._chaos),
            "CHAOS_RUN": str(self.paths.root),
            "CHAOS_ENGINE": str(HERE / "engine.py") if plan.engine == "contract" else "",
        }
        self._starts = self._armed = 0
        self._in_case = False
        self._rl: subprocess.Popen[bytes] | None = None
        self._kills: list[dict[str, Any]] = []

    def run(self) -> None:
        """Run all cases and finish the run; problems are in `results` and `problems`."""
        try:
            self._start()
            for case in self.plan.cases:
                result = CaseResult(case)
                self.results.append(result)
                self._in_case = True
                self._run_case(result)
                self._in_case = False
            self._arm(None)
            self._deadline = time.monotonic() + 2 * self._deadline_seconds
            self._until(lambda: False, "the end of the run", CaseResult(Case(-1, "after all cases", ())))
        except _Finished:
            pass
        except _Hung as hung:
            if self._in_case:
                self.results[-1].outcome, self.results[-1].why = Outcome.HUNG, str(hung)
            self.problems.append(f"hung: {hung}")
        finally:
            self._clear()
            left = self.plan.cases[len(self.results) :]
            self.results += [CaseResult(case, Outcome.MISSED, why="the run was over") for case in left]

    def _run_case(self, result: CaseResult) -> None:
        self._deadline = time.monotonic() + self._deadline_seconds
        resumes = self._resumes()
        for fault in result.case.faults:
            if fault.after_resume:
                self._until(lambda: self._resumes() > resumes, "the run to roll back", result)
            self._arm(fault)
            marker = self._chaos / f"fired_{self._armed}.json"
            result.outcome = Outcome.MISSED
            self._until(lambda marker=marker: _is_whole(marker), f"the run to reach {fault}", result)
            result.outcome = Outcome.RECOVERED if result.outcome is Outcome.MISSED else result.outcome
            self._kills.append(json.loads(marker.read_text()) | {"killed": fault.killed})
            result.kills += 1
            struck = time.monotonic()
        killed = result.case.faults[-1].killed  # the orchestrator itself replaces its workers
        ends_rl = killed == "rl" or (not self.plan.restarts and killed not in ("worker", "forkserver"))
        enough, starts = self._enough(), self._starts + ends_rl
        self._until(
            lambda: self._starts >= starts and self._steps() >= enough, f"{enough} steps after the kill", result
        )
        result.seconds = time.monotonic() - struck
        self._await_notices()
        self._note_detections(result)

    def _enough(self) -> int:
        """Number of steps that needs the whole run: more than the existing batches and sampled groups allow."""
        shipped = steps_in(self.paths.rollouts_dir)[-1:] or [-1]
        return min(STEPS, max(self._steps(), shipped[0] + 1) + self.plan.async_level + 1)

    def _until(self, holds: Callable[[], bool], what: str, result: CaseResult) -> None:
        """Wait for a condition; restart the run if it ends meanwhile."""
        assert self._rl is not None
        starts = 0
        while not holds():
            if time.monotonic() > self._deadline:
                raise _Hung(f"waited for {what}")
            code = self._rl.poll()
            if code is not None and holds():  # it became true just before the exit
                return
            if code == 0:
                raise _Finished
            if code is not None:
                starts += 1
                self._ended(code, result)
                if starts > _STARTS:
                    raise _Hung(f"{starts} starts, and each run ended before {what}")
                self._start()
            time.sleep(_POLL_SECONDS)

    def _ended(self, code: int, result: CaseResult) -> None:
        """Check how `rl` exited, and wait until none of its processes is left."""
        until = time.monotonic() + _LEFTOVERS_SECONDS
        while (left := self._processes()) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        if left:
            self.problems.append(f"{result.case.name}: {[(p.pid, _command(p)) for p in left]} outlived rl")
            self._clear()
        victims = [kill["killed"] for kill in self._kills]
        self._note_detections(result, time.time())
        if "rl" in victims:
            return
        lines = (self.root / f"rl_{self._starts}.err").read_text().splitlines()
        if code != 1 or len(lines) != 1 or not lines[0].startswith("error: "):
            result.outcome, result.why = Outcome.UNCLEAR, f"rl exited with {code} and printed {lines[-3:]}"
        elif not victims:
            self.problems.append(f"{result.case.name}: rl exited without a kill: {lines[0]}")
        elif self.plan.restarts:
            result.outcome, result.why = Outcome.GAVE_UP, lines[0]
        elif not result.why:
            result.why = lines[0]

    def _start(self) -> None:
        self._starts += 1
        arguments = ["@", str(self._file)]
        if self._starts > 1:
            arguments += ["--ckpt.resume-step", "-1"]
        if self.plan.restarts:
            arguments += ["--max-restarts", str(MANY_RESTARTS)]
        stem = self.root / f"rl_{self._starts}"
        with stem.with_suffix(".out").open("wb") as out, stem.with_suffix(".err").open("wb") as err:
            self._rl = subprocess.Popen(
                [executable("rl"), *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=self._environment
            )

    def _arm(self, fault: Fault | None) -> None:
        self._armed += 1
        temporary = self._chaos / "armed.tmp"
        temporary.write_text(json.dumps(fault.armed(self._armed) if fault else None))
        temporary.replace(self._chaos / "armed.json")

    def _await_notices(self) -> None:
        """Wait until all kills so far are reported: a quick recovery can precede the next check of `rl`."""
        until = time.monotonic() + _NOTICE_SECONDS
        while any(self._noticed(kill) is None for kill in self._kills):
            if time.monotonic() > until or self._rl is None or self._rl.poll() is not None:
                return
            time.sleep(_POLL_SECONDS)

    def _noticed(self, kill: dict[str, Any]) -> float | None:
        """Time of the first event of a killed process, or of a rank's torchrun; for a worker, of its replacement."""
        if kill["killed"] == "worker":
            latest = self._chaos / "pids" / "worker"
            return None if int(latest.read_text() or 0) in (0, kill["pid"]) else latest.stat().st_mtime
        events = (e for e in json_lines(self.paths.events) if e["time"] >= kill["time"] and e["event"] != "started")
        launcher = "trainer" if kill["killed"].startswith("rank") else None
        return min((e["time"] for e in events if e.get("pid") == kill["pid"] or e["name"] == launcher), default=None)

    def _note_detections(self, result: CaseResult, ended: float | None = None) -> None:
        """Record when the kills so far were detected; those that `rl` could not report, at its end.

        Args:
            result: the case.
            ended: time when no process of the run was left; None if it continues.
        """
        kills, self._kills = self._kills, []
        for kill in kills:
            noticed = (None if kill["killed"] == "rl" else self._noticed(kill)) or ended
            if noticed is not None:
                result.detected_seconds.append(max(0.0, noticed - kill["time"]))

    def _resumes(self) -> int:
        """How often the run has rolled back to a checkpoint."""
        resume = read_resume(self.paths.checkpoints_dir)
        return resume.branch if resume else 0

    def _steps(self) -> int:
        """Number of steps that the trainer has reported."""
        lines = json_lines(self.paths.metrics("trainer"))
        return lines[-1]["step"] + 1 if lines else 0

    def _processes(self) -> list[psutil.Process]:
        """All living processes of this session; its orphans are children of this process, a subreaper."""
        found = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.environ().get("CHAOS_DIR") == str(self._chaos) and alive(process):
                    found.append(process)
        return found

    def _clear(self) -> None:
        while left := self._processes():
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            psutil.wait_procs(left, timeout=1)
        if self._rl is not None:
            self._rl.wait()


def settings(plan: Plan, run: Path, model: Path) -> dict[str, Any]:
    """The configuration of a session's run."""
    ckpt: dict[str, Any] = {"interval": INTERVAL, "save_async": plan.save_async}
    if plan.keep_last is not None:
        ckpt["keep_last"] = plan.keep_last
    return {
        "output_dir": str(run),
        "seq_len": 64,
        "max_steps": STEPS,
        "async_level": plan.async_level,
        "model": {"name": str(model)},
        "ckpt": ckpt,
        "trainer_ranks": plan.ranks,
        "trainer": {"optim": {"lr": 1e-3}, "wait_timeout_seconds": WAIT_SECONDS, "dist_timeout_seconds": 20},
        "orchestrator": {
            "batch_size": BATCH_SIZE,
            "rollouts_per_example": GROUP,
            "sampling": {"max_tokens": 12, "seed": SAMPLING_SEED},
            "env": [{"id": "chaos_letters"}],
            "filter_zero_advantage": plan.filtered,
            "wait_timeout_seconds": WAIT_SECONDS,
        },
        "inference": {"server": {"port": free_port()}, "lease_seconds": 10, "model": {"max_model_len": 64}},
    }


def _is_whole(marker: Path) -> bool:
    """Whether a fault has struck and its marker is complete."""
    try:
        return bool(json.loads(marker.read_text()))
    except (OSError, ValueError):
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:4])
    except psutil.Error:
        return "?"
