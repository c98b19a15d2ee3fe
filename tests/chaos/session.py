"""One run that is disturbed again and again: kill, wait until it has recovered or ended, start it again, go on.

A case begins when its first fault is armed and ends when the trainer has done more steps than before the kill. Waiting
is bounded by one deadline a case; what passes it is a hang, and all processes of the run are killed.
"""

import json
import os
import random
import signal
import socket
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

from prime_rl.run.checkpoints import read_resume
from prime_rl.run.paths import RunPaths, steps_in
from tests.chaos.cases import INTERVAL, STEPS, Case, Fault, Plan
from tests.support.command import alive, clean_environment, executable

HERE = Path(__file__).parent
BATCH_SIZE, GROUP = 8, 2
SAMPLING_SEED = 7
MANY_RESTARTS = 8
_POLL_S = 0.05
_LEFTOVERS_S = 10.0
_NOTICE_S = 5.0
_STARTS = 4
"""How often a run may be started again in one case."""


class Outcome(StrEnum):
    """How a case ended."""

    RECOVERED = "recovered"
    MISSED = "missed"
    """The run was over before it came to the point: no kill."""
    GAVE_UP = "gave up"
    """`rl` ended although it may restart what dies."""
    UNCLEAR = "unclear error"
    """`rl` ended with something else than one line that begins with `error:`."""
    HUNG = "hung"


@dataclass
class Played:
    """What became of a case.

    Attributes:
        case: which.
        outcome: how it ended.
        kills: that were carried out.
        detected_s: from each kill until it was noticed, where that is told.
        seconds: from the last kill until the whole run had gone on.
        why: what is to be said of it.
    """

    case: Case
    outcome: Outcome = Outcome.RECOVERED
    kills: int = 0
    detected_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    why: str = ""


class _Hung(Exception):
    """The deadline of a case has passed; the message says what was waited for."""


class _Finished(Exception):
    """The run is over, with exit code 0."""


class Session:
    """A run directory, and the `rl` that works in it."""

    def __init__(self, plan: Plan, root: Path, model: Path, deadline_s: float) -> None:
        """Prepare; nothing is started.

        Args:
            plan: what to do.
            root: folder of the session, which does not exist.
            model: to train.
            deadline_s: longest time for a case.
        """
        self.plan, self.root, self.paths = plan, root, RunPaths(root / "run")
        self.played: list[Played] = []
        self.problems: list[str] = []
        self._deadline_s, self._deadline = deadline_s, 0.0
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
        """Play all cases, and let the run come to its end. What went wrong is in `played` and `problems`."""
        try:
            self._start()
            for case in self.plan.cases:
                played = Played(case)
                self.played.append(played)
                self._in_case = True
                self._play(played)
                self._in_case = False
            self._arm(None)
            self._deadline = time.monotonic() + 2 * self._deadline_s
            self._until(lambda: False, "the end of the run", Played(Case(-1, "after all cases", ())))
        except _Finished:
            pass
        except _Hung as hung:
            if self._in_case:
                self.played[-1].outcome, self.played[-1].why = Outcome.HUNG, str(hung)
            self.problems.append(f"hung: {hung}")
        finally:
            self._clear()
            left = self.plan.cases[len(self.played) :]
            self.played += [Played(case, Outcome.MISSED, why="the run was over") for case in left]

    def _play(self, played: Played) -> None:
        self._deadline = time.monotonic() + self._deadline_s
        resumes = self._resumes()
        for fault in played.case.faults:
            if fault.after_resume:
                self._until(lambda: self._resumes() > resumes, "the run to go back", played)
            self._arm(fault)
            marker = self._chaos / f"fired_{self._armed}.json"
            played.outcome = Outcome.MISSED
            self._until(lambda marker=marker: _is_whole(marker), f"the run to come to {fault}", played)
            played.outcome = Outcome.RECOVERED if played.outcome is Outcome.MISSED else played.outcome
            self._kills.append(json.loads(marker.read_text()) | {"killed": fault.killed})
            played.kills += 1
            struck = time.monotonic()
        enough, starts = self._enough(), self._starts + self._has_to_end(played.case.faults[-1])
        self._until(
            lambda: self._starts >= starts and self._steps() >= enough, f"{enough} steps after the kill", played
        )
        played.seconds = time.monotonic() - struck
        self._await_notices()
        self._note_detections(played)

    def _enough(self) -> int:
        """Steps that the trainer cannot do unless the whole run goes on: more than there are batches for by now, and
        than could be made of what is sampled already.
        """
        shipped = steps_in(self.paths.rollouts_dir)[-1:] or [-1]
        return min(STEPS, max(self._steps(), shipped[0] + 1) + self.plan.async_level + 1)

    def _has_to_end(self, fault: Fault) -> bool:
        """Whether `rl` has to end of this kill: the orchestrator itself replaces its workers."""
        return fault.killed == "rl" or (not self.plan.restarts and fault.killed not in ("worker", "forkserver"))

    def _until(self, holds: Callable[[], bool], what: str, played: Played) -> None:
        """Wait; a run that ends meanwhile is started again."""
        assert self._rl is not None
        starts = 0
        while not holds():
            if time.monotonic() > self._deadline:
                raise _Hung(f"waited for {what}")
            code = self._rl.poll()
            if code is not None and holds():  # it came to hold just before the end
                return
            if code == 0:
                raise _Finished
            if code is not None:
                starts += 1
                self._ended(code, played)
                if starts > _STARTS:
                    raise _Hung(f"{starts} starts, and each ended before {what}")
                self._start()
            time.sleep(_POLL_S)

    def _ended(self, code: int, played: Played) -> None:
        """Look at how `rl` ended, and wait until nothing of it is left."""
        until = time.monotonic() + _LEFTOVERS_S
        while (left := self._processes()) and time.monotonic() < until:
            time.sleep(_POLL_S)
        if left:
            self.problems.append(f"{played.case.name}: {[(p.pid, _command(p)) for p in left]} outlived rl")
            self._clear()
        victims = [kill["killed"] for kill in self._kills]
        self._note_detections(played, time.time())
        if "rl" in victims:
            return
        told = (self.root / f"rl_{self._starts}.err").read_text().splitlines()
        if code != 1 or len(told) != 1 or not told[0].startswith("error: "):
            played.outcome, played.why = Outcome.UNCLEAR, f"rl ended with {code} and said {told[-3:]}"
        elif not victims:
            self.problems.append(f"{played.case.name}: rl ended, and nobody had been killed: {told[0]}")
        elif self.plan.restarts:
            played.outcome, played.why = Outcome.GAVE_UP, told[0]
        elif not played.why:
            played.why = told[0]

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
                [executable("rl"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self._environment,
            )

    def _arm(self, fault: Fault | None) -> None:
        self._armed += 1
        temporary = self._chaos / "armed.tmp"
        temporary.write_text(json.dumps(fault.armed(self._armed) if fault else None))
        temporary.replace(self._chaos / "armed.json")

    def _await_notices(self) -> None:
        """Wait until all kills so far are told of: what mends itself at once may have gone on before `rl` looked."""
        until = time.monotonic() + _NOTICE_S
        while any(self._noticed(kill) is None for kill in self._kills):
            if time.monotonic() > until or self._rl is None or self._rl.poll() is not None:
                return
            time.sleep(_POLL_S)

    def _noticed(self, kill: dict[str, Any]) -> float | None:
        """When `rl` wrote the first event of a process that was killed; of a worker, when another took its place."""
        if kill["killed"] == "worker":
            latest = self._chaos / "pids" / "worker"
            return None if int(latest.read_text() or 0) in (0, kill["pid"]) else latest.stat().st_mtime
        events = (e for e in _lines(self.paths.events) if e["time"] >= kill["time"] and e["event"] != "started")
        return min((e["time"] for e in events if e.get("pid") == kill["pid"]), default=None)

    def _note_detections(self, played: Played, ended: float | None = None) -> None:
        """Tell when the kills so far were noticed; what `rl` did not live to tell, at its end.

        Args:
            played: the case.
            ended: when nothing of the run was left any more; None if it goes on.
        """
        kills, self._kills = self._kills, []
        for kill in kills:
            noticed = (None if kill["killed"] == "rl" else self._noticed(kill)) or ended
            if noticed is not None:
                played.detected_s.append(max(0.0, noticed - kill["time"]))

    def _resumes(self) -> int:
        """How often the run has gone back to a checkpoint."""
        resume = read_resume(self.paths.checkpoints_dir)
        return resume.branch if resume else 0

    def _steps(self) -> int:
        """Steps that the trainer has reported."""
        lines = _lines(self.paths.metrics("trainer"))
        return lines[-1]["step"] + 1 if lines else 0

    def _processes(self) -> list[psutil.Process]:
        """All processes of this session that live; orphans are children of this process, a subreaper."""
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
    wait_s = 300.0 if plan.engine == "real" else 120.0  # a server takes its time to start
    return {
        "output_dir": str(run),
        "seq_len": 64,
        "max_steps": STEPS,
        "async_level": plan.async_level,
        "model": {"name": str(model)},
        "ckpt": ckpt,
        "trainer_ranks": plan.ranks,
        "trainer": {"optim": {"lr": 1e-3}, "wait_timeout_seconds": wait_s, "dist_timeout_seconds": 20},
        "orchestrator": {
            "batch_size": BATCH_SIZE,
            "rollouts_per_example": GROUP,
            "sampling": {"max_tokens": 12, "seed": SAMPLING_SEED},
            "env": [{"id": "chaos_letters"}],
            "filter_zero_advantage": plan.filtered,
            "wait_timeout_seconds": wait_s,
        },
        "inference": {"server": {"port": _port()}, "lease_seconds": 10, "model": {"max_model_len": 64}},
    }


def _port() -> int:
    """A free port that the kernel gives to nobody else: the server is started on it more than once."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(20000, 32000)))
            return int(probe.getsockname()[1])


def _is_whole(marker: Path) -> bool:
    """Whether a fault has struck, and its marker can be read."""
    try:
        return bool(json.loads(marker.read_text()))
    except (OSError, ValueError):
        return False


def _lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; one that is still being written is left out."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:4])
    except psutil.Error:
        return "?"
