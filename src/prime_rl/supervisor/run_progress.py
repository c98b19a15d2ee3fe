"""Progress of a run, read from metrics/*.jsonl while it is written."""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from prime_rl.core.json_lines import JsonTail
from prime_rl.liveness.heartbeat_monitor import ENDED, FAILED, read_heartbeats
from prime_rl.monitors.bottleneck import Bottleneck, SpeedSettings, find_bottleneck
from prime_rl.monitors.metric_table import ORCHESTRATOR
from prime_rl.storage.paths import RUN_FOLDER, RunPaths

ROLES = ("orchestrator", "trainer")
_RECENT_STEPS = 10
_KEPT_LINES = 200


@dataclass(frozen=True, slots=True)
class Activity:
    """What processes do, and for how long: those of one role with the same phase."""

    names: tuple[str, ...]
    phase: str
    seconds: float
    waiting_for: str | None = None

    @property
    def who(self) -> str:
        """Name of the first process, and the number of others."""
        return self.names[0] + (f" and {len(self.names) - 1} more" if self.names[1:] else "")


class ProcessActivities:
    """What the processes of a run do now, from their heartbeats; before the first one, from the events of `rl`."""

    def __init__(self, folders: Sequence[RunPaths]) -> None:
        """Know the directories of the run: of several runs, the trainer's first."""
        self._folders, self._events = folders, JsonTail(folders[0].events)
        self._started: dict[str, tuple[int, float]] = {}
        self._newest_start = 0.0

    @property
    def newest_start(self) -> float:
        """When `rl` last started a process, in Unix seconds; 0 before the first one."""
        self._read_events()
        return self._newest_start

    def _read_events(self) -> None:
        for event in self._events.read():
            if event.get("event") in ("started", "restarted"):
                self._started[str(event.get("name"))] = int(event.get("pid") or 0), float(event["time"])
                self._newest_start = max(self._newest_start, float(event["time"]))
            elif event.get("event") in ("ended", "failed", "finished"):
                self._started.pop(str(event.get("name")), None)

    def read(self) -> list[Activity]:
        """Return the activities of the processes that have not ended, in order of their names."""
        self._read_events()
        below = [RunPaths(self._folders[0].root / name) for name in self._started if RUN_FOLDER.fullmatch(name)]
        given = {folder.root for folder in self._folders}
        now, found, known = time.time(), list[Activity](), set[str]()
        for folder in (*self._folders, *(run for run in below if run.root not in given)):
            prefix = f"{folder.root.name}/" if folder is not self._folders[0] else ""
            for name, beat in read_heartbeats(folder).items():
                known |= {beat.role, folder.root.name} if prefix else {beat.role, name}
                if beat.role != "rl" and beat.phase not in (ENDED, FAILED):
                    seconds = max(0.0, now - beat.phase_since)
                    waiting_for = beat.waiting_for if (beat.waiting_for or "") not in beat.phase else None
                    found.append(Activity((prefix + name,), beat.phase, seconds, waiting_for))
        found += [Activity((n,), "start", now - time_) for n, (_, time_) in self._started.items() if n not in known]
        merged: dict[tuple[str, str], Activity] = {}
        for one in sorted(found, key=lambda activity: activity.names):
            key = one.names[0].rpartition("_")[0] or one.names[0], one.phase
            first = merged.get(key, one)
            names = (*first.names, *one.names) if key in merged else one.names
            merged[key] = Activity(names, one.phase, max(first.seconds, one.seconds), one.waiting_for)
        return list(merged.values())


class RunProgress:
    """Progress of a run: finished steps (a rollback reduces them), the largest staleness so far, and lost tokens.

    `last` is the latest finished step as one object.

    A token is lost if it was neither trained on nor dropped with its complete group. Calls outside the turns of a
    rollout, as of a simulated user, lose nothing.
    """

    def __init__(self, settings: SpeedSettings | None = None) -> None:
        """Start without steps; `settings` as of `find_bottleneck`."""
        self._settings = settings or SpeedSettings()
        self.steps = 0
        self.staleness: float | None = None
        self.lost: float | None = None
        self._rewards: dict[int, float] = {}
        self._pending: dict[str, dict[int, dict[str, Any]]] = {role: {} for role in ROLES}
        self.last: dict[str, Any] = {}
        self._times: list[float] = []
        self._waits: list[dict[str, float]] = []
        self._lines = {role: deque[Mapping[str, Any]](maxlen=_KEPT_LINES) for role in ROLES}

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each finished step, in order, without steps that a rollback discarded."""
        return list(self._rewards.values())

    def add(self, role: str, metrics: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Add one line of `role`; yield each step that both roles have now reported, in order, as one object.

        Lines of evaluations, which have the step but no rewards of a batch, are skipped.
        """
        self._lines[role].append(metrics)
        if role == "orchestrator" and "reward/mean" not in metrics:
            return
        self._pending[role][metrics["step"]] = metrics
        trained, shipped = self._pending["trainer"], self._pending["orchestrator"]
        for step in sorted(trained.keys() & shipped.keys()):
            ours, theirs = trained.pop(step), shipped.pop(step)
            waits = {
                "trainer for batches": _share(ours, "time/wait_for_batch"),
                "sampling for weights": _share(theirs, "time/wait_for_policy"),
            }
            self._waits = [*self._waits[1 - _RECENT_STEPS :], waits]
            whole = {**ours, **{k: v for k, v in theirs.items() if not k.startswith("time/")}}
            self._count(whole)
            yield whole

    def restart_clock(self) -> None:
        """Forget how long the steps so far took: an earlier process trained them."""
        self._times.clear()
        self._waits.clear()
        for lines in self._lines.values():
            lines.clear()

    @property
    def bottleneck(self) -> Bottleneck | None:
        """What limits the speed of the last steps; None before there are enough."""
        return find_bottleneck(self._lines["trainer"], self._lines["orchestrator"], settings=self._settings)

    def waits(self) -> dict[str, float]:
        """Share of the last ten steps for which the trainer waited for batches, and sampling for new weights."""
        names = self._waits[-1] if self._waits else {}
        return {name: mean(waits[name] for waits in self._waits) for name in names}

    def eta_seconds(self, max_steps: int | None) -> float | None:
        """Remaining seconds at the pace of the last ten steps; None if unknown."""
        recent = self._times[-1 - _RECENT_STEPS :]
        if max_steps is None or len(recent) < 2:
            return None
        return (recent[-1] - recent[0]) / (len(recent) - 1) * (max_steps - self.steps)

    def _count(self, metrics: Mapping[str, Any]) -> None:
        step = metrics["step"]
        self.steps, self.last = step + 1, dict(metrics)
        self._times.append(time.monotonic())
        self._rewards = {done: reward for done, reward in self._rewards.items() if done < step}
        if (reward := metrics.get("reward/mean")) is not None:
            self._rewards[step] = reward
        if (staleness := metrics.get("staleness/max")) is not None:
            self.staleness = max(staleness, self.staleness or 0)
        if (unaccounted := ORCHESTRATOR.read(metrics, "tokens/unaccounted")) is not None:
            reasons = ("retried", "failed", "replayed", "cancelled")
            self.lost = unaccounted + sum(metrics.get(f"tokens/lost/{reason}", 0) for reason in reasons)


def _share(row: Mapping[str, Any], name: str) -> float:
    """The share of a wait in its step."""
    wait, step = row.get(name) or 0.0, row.get("time/step") or 0.0
    return min(1.0, wait / step) if step > 0 else 0.0


def format_number(value: float | None) -> str:
    """Write a number with three digits; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.3g}"


def format_clock(seconds: float) -> str:
    """Write a duration as m:ss or h:mm:ss."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
