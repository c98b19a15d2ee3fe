"""Progress of a run, read from metrics/*.jsonl while it is written."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

ROLES = ("orchestrator", "trainer")
_RECENT_STEPS = 10


class JsonTail:
    """Reads the lines that are appended to a file of JSON lines; incomplete lines are read later.

    A resume replaces the file by another one that begins with some of the same lines (`storage.rollback`). They are not
    yielded again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._offset = self._num_lines = 0
        self._seen: list[int] = []

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of the new lines; none while the file does not exist."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                self._inode, self._offset, self._num_lines = inode, 0, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._num_lines += 1
                if self._seen[self._num_lines - 1 : self._num_lines] != [hash(line)]:
                    self._seen[self._num_lines - 1 :] = [hash(line)]
                    yield json.loads(line)


class RunProgress:
    """Progress of a run: finished steps (a rollback reduces them), the largest staleness so far, and wasted tokens.

    `last` is the latest finished step as one object.

    A token is wasted if it was neither trained on nor dropped for a counted reason.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.staleness: float | None = None
        self.wasted: float | None = None
        self._rewards: dict[int, float] = {}
        self._pending: dict[str, dict[int, dict[str, Any]]] = {role: {} for role in ROLES}
        self.last: dict[str, Any] = {}
        self._times: list[float] = []
        self._waits: list[dict[str, float]] = []

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each finished step, in order, without steps that a rollback discarded."""
        return list(self._rewards.values())

    def add(self, role: str, metrics: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Add one line of `role`; yield each step that both roles have now reported, in order, as one object.

        Lines of evaluations, which have the step but no rewards of a batch, are skipped.
        """
        if role == "orchestrator" and "reward/mean" not in metrics:
            return
        self._pending[role][metrics["step"]] = metrics
        trained, shipped = self._pending["trainer"], self._pending["orchestrator"]
        for step in sorted(trained.keys() & shipped.keys()):
            ours, theirs = trained.pop(step), shipped.pop(step)
            waits = {who: _share(row, name) for who, name, row in _waits_of(ours, theirs)}
            self._waits = [*self._waits[1 - _RECENT_STEPS :], waits]
            whole = {**ours, **{k: v for k, v in theirs.items() if not k.startswith("time/")}}
            self._count(whole)
            yield whole

    def restart_clock(self) -> None:
        """Forget how long the steps so far took: an earlier process trained them."""
        self._times.clear()
        self._waits.clear()

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
        if (wasted := metrics.get("tokens/wasted")) is not None:
            self.wasted = wasted + sum(value for name, value in metrics.items() if name.startswith("tokens/lost/"))


def _waits_of(trained: Mapping[str, Any], shipped: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    yield "trainer for batches", "time/wait_for_batch", trained
    yield "sampling for weights", "time/wait_for_policy", shipped


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
