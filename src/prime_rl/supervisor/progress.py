"""What a run shows on the console: steps as they come, and a table at the end. Read from metrics/*.jsonl alone."""

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from prime_rl.run.paths import RunPaths
from prime_rl.run.wait import changes

_ROLES = ("orchestrator", "trainer")


class JsonTail:
    """Reads the lines that were added to a file of JSON lines; a line that is still being written waits.

    A resume puts another file in its place, which begins with some of the same lines (`run.rewind`); they are not read
    again.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._file: int | None = None
        self._number = 0
        self._seen: list[int] = []

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of the new lines; nothing while the file does not exist."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            if (number := os.fstat(file.fileno()).st_ino) != self._file:
                self._file, self._offset, self._number = number, 0, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._number += 1
                if self._seen[self._number - 1 : self._number] != [hash(line)]:
                    self._seen[self._number - 1 :] = [hash(line)]
                    yield json.loads(line)


class Story:
    """What is known of a run so far.

    Attributes:
        steps: steps that the trainer has finished; a resume begins with fewer.
        staleness: the largest seen.
        wasted: tokens sampled and thrown away to keep the bound.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._rewards: dict[int, float] = {}
        self.staleness: float | None = None
        self.wasted: float | None = None
        self._pending: dict[str, dict[int, dict[str, Any]]] = {role: {} for role in _ROLES}
        self._times: list[float] = []

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step that was finished and not abandoned since, in order."""
        return [self._rewards[step] for step in sorted(self._rewards)]

    def add(self, role: str, metrics: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Take one line of `role`; yield the steps that both have reported now, in order, as one object each."""
        self._pending[role][metrics["step"]] = metrics
        trained, shipped = self._pending["trainer"], self._pending["orchestrator"]
        for step in sorted(trained.keys() & shipped.keys()):
            whole = {**trained.pop(step), **{k: v for k, v in shipped.pop(step).items() if not k.startswith("time/")}}
            self._count(whole)
            yield whole

    def eta_s(self, max_steps: int | None) -> float | None:
        """Seconds to go at the pace of the last ten steps; None if that is not known."""
        recent = self._times[-11:]
        if max_steps is None or len(recent) < 2:
            return None
        return (recent[-1] - recent[0]) / (len(recent) - 1) * (max_steps - self.steps)

    def _count(self, step: Mapping[str, Any]) -> None:
        self.steps = step["step"] + 1
        self._rewards = {done: reward for done, reward in self._rewards.items() if done < self.steps - 1}
        self._times.append(time.monotonic())
        if (reward := step.get("reward/mean")) is not None:
            self._rewards[step["step"]] = reward
        if (staleness := step.get("staleness/max")) is not None:
            self.staleness = max(staleness, self.staleness or 0)
        self.wasted = step.get("tokens/wasted", self.wasted)


class Display:
    """Shows a run: a progress bar on a terminal, a line a step elsewhere."""

    def __init__(self, paths: RunPaths, max_steps: int | None, console: Console) -> None:
        self.story = Story()
        self._tails = {role: JsonTail(paths.metrics(role)) for role in _ROLES}
        self._paths, self._max_steps, self._console = paths, max_steps, console
        self._started = time.monotonic()
        self._bar = Progress(BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
        self._task = self._bar.add_task("", total=max_steps)
        self._line = "starting"

    async def follow(self) -> None:
        """Show steps until cancelled."""
        live = Live(get_renderable=self._render, console=self._console, transient=True)
        with live if self._console.is_terminal else nullcontext():
            async for _ in changes(self._paths.metrics_dir, asyncio.Event()):
                self.refresh()

    def refresh(self) -> None:
        """Show what was written since the last time."""
        for role, lines in self._tails.items():
            for metrics in lines.read():
                for step in self.story.add(role, metrics):
                    self._show(step)

    def summary(self) -> Table:
        """The closing table."""
        story = self.story
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column()
        table.add_column(overflow="fold")
        table.add_row("steps", f"{story.steps}" + (f" of {self._max_steps}" if self._max_steps else ""))
        if story.rewards:
            first, last = _mean(story.rewards[:3]), _mean(story.rewards[-5:])
            table.add_row("reward", f"{first:.3f} (first 3 steps) -> {last:.3f} (last 5)")
        table.add_row("staleness, largest", _number(story.staleness))
        table.add_row("tokens wasted", _number(story.wasted))
        table.add_row("time", _clock(time.monotonic() - self._started))
        table.add_row("metrics", f"{self._paths.metrics_dir}/")
        table.add_row("samples", f"{self._paths.samples_dir}/")
        table.add_row("weights", f"{self._paths.weights_dir}/")
        table.add_row("logs", f"{self._paths.logs_dir}/")
        return table

    def _show(self, step: Mapping[str, Any]) -> None:
        line = " | ".join(
            f"{label} {_number(step.get(key))}"
            for label, key in (
                ("reward", "reward/mean"),
                ("loss", "loss"),
                ("staleness", "staleness/max"),
                ("tokens/s", "perf/tokens_per_second"),
            )
        )
        eta = self.story.eta_s(self._max_steps)
        line += f" | ETA {_clock(eta)}" if eta is not None else ""
        self._bar.update(self._task, completed=self.story.steps)
        self._line = line
        if not self._console.is_terminal:
            total = f"/{self._max_steps}" if self._max_steps else ""
            elapsed = _clock(time.monotonic() - self._started)
            self._console.print(f"{elapsed} | step {step['step'] + 1}{total} | {line}", soft_wrap=True)

    def _render(self) -> Group:
        """Two rows, so that both fit on a narrow terminal."""
        return Group(self._bar, Text(self._line, no_wrap=True, overflow="ellipsis"))


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.3g}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
