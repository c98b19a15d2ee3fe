"""The console output of `rl`: a live display or one line per step, and a table at the end."""

import asyncio
import os
import shlex
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from prime_rl.core.entry_point import uv_run
from prime_rl.core.json_lines import JsonTail
from prime_rl.core.terminal_escape import escape_control_chars
from prime_rl.liveness.heartbeat_monitor import read_heartbeats
from prime_rl.monitors.bottleneck import SpeedSettings
from prime_rl.monitors.slow_rank import NUM_STEPS, find_slow_rank
from prime_rl.storage.paths import RUN_FOLDER, RunPaths, steps_in
from prime_rl.storage.wait_for import watch_directory
from prime_rl.supervisor.run_progress import (
    ROLES,
    Activity,
    ProcessActivities,
    RunProgress,
    format_clock,
    format_number,
)

_FIGURES = {"reward": "reward/mean", "loss": "loss", "staleness": "staleness/max", "tokens/s": "perf/tokens_per_second"}
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = ".:-=+*#@"
_SPARKLINE_WIDTH = 40
_ACTIVITY_SECONDS = 1.0
_BOTTLENECK_STEPS = 10
"""Number of steps after which the bottleneck is shown again."""
_LABEL_WIDTH = 9


class DisconnectableOutput:
    """A text stream that is redirected to `/dev/null` when its terminal is closed or the reader of its pipe exits."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`, or drop it if the stream is disconnected."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Write the buffered text."""
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError:  # redirect the descriptor, so that flushing the rest of the buffer at exit does not fail
            with Path(os.devnull).open("wb") as null:
                os.dup2(null.fileno(), self._stream.fileno())


class ConsoleProgress:
    """Shows a run: a live display on a terminal, otherwise one line per step.

    Steps before a resume count in the summary and are not shown again. `name` is that of one of several runs, and
    `settings` as of `find_bottleneck`.
    """

    def __init__(
        self,
        paths: RunPaths,
        max_steps: int | None,
        console: Console,
        name: str = "",
        settings: SpeedSettings | None = None,
    ) -> None:
        self.progress, self._name = RunProgress(settings), name
        self._tails = {role: JsonTail(paths.metrics(role)) for role in ROLES}
        self._paths, self._max_steps, self._console = paths, max_steps, console
        self._trained: deque[Mapping[str, Any]] = deque(maxlen=NUM_STEPS)
        self._slow_ranks = set[int]()
        self._warnings = JsonTail(paths.warnings)
        list(self._warnings.read())  # skip those of an earlier process
        shared = [RunPaths(paths.root.parent)] if RUN_FOLDER.fullmatch(paths.root.name) else []
        self._events = [JsonTail(folder.events) for folder in (paths, *shared)]
        self._is_restarted()  # skip them too
        for role, lines in self._tails.items():
            for metrics in lines.read():  # of an earlier start of the run
                list(self.progress.add(role, metrics))
        self.progress.restart_clock()
        self._resumes = self.progress.steps > 0
        self._started = time.monotonic()
        self._is_live = is_live(console)
        self.display = LiveDisplay(self.progress, max_steps, name)

    async def follow(self) -> None:
        """Show steps until cancelled."""
        async for _ in watch_directory(self._paths.metrics_dir, asyncio.Event()):
            self.refresh()

    def refresh(self) -> None:
        """Show the lines written since the last call."""
        for warning in self._warnings.read():
            self.show_event(f"warning: {warning['text']}")
        if self._is_restarted():
            self.progress.restart_clock()
        for role, lines in self._tails.items():
            for metrics in lines.read():
                if role == "trainer":
                    self._check_ranks(metrics)
                for step in self.progress.add(role, metrics):
                    self._show(step)
                    if (step["step"] + 1) % _BOTTLENECK_STEPS == 0 and self.progress.bottleneck is not None:
                        name = f"{self._name}: " if self._name else ""
                        self.show_event(f"{name}{self.progress.bottleneck}")

    def _is_restarted(self) -> bool:
        """Return whether a process of this run was restarted since the last call."""
        events = [event for tail in self._events for event in tail.read() if event.get("event") == "restarted"]
        names = {str(event.get("name")) for event in events}
        return any(name == self._paths.root.name or not RUN_FOLDER.fullmatch(name) for name in names)

    def _check_ranks(self, metrics: Mapping[str, Any]) -> None:
        """Show once that a rank of the trainer is slow."""
        if (rank := metrics.get("rank/slowest")) is None:
            return
        self._trained.append(metrics)
        if rank in self._slow_ranks:
            return
        beats = read_heartbeats(self._paths, ("trainer",))
        if hint := find_slow_rank(self._trained, {name: beat.host for name, beat in beats.items()}):
            self._slow_ranks.add(rank)
            self.show_event(f"hint: {hint}")

    @property
    def has_new_steps(self) -> bool:
        """Whether this start of the run has finished a step."""
        return self.progress.steps > 0 and not self._resumes

    def summary(self) -> Table:
        """The closing table."""
        progress = self.progress
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column()
        table.add_column(overflow="fold")
        if self._name:
            table.add_row("run", self._name)
        table.add_row("steps", f"{progress.steps}" + (f" of {self._max_steps}" if self._max_steps else ""))
        if progress.rewards:
            part = max(1, min(3, len(progress.rewards) // 2))
            first, last = mean(progress.rewards[:part]), mean(progress.rewards[-part:])
            table.add_row("reward of steps", f"{first:.3f} (first {part}) -> {last:.3f} (last {part})")
        table.add_row("staleness, largest", format_number(progress.staleness))
        table.add_row("tokens lost", format_number(progress.lost))
        if failed := progress.last.get("groups/failed"):
            table.add_row("groups failed", f"{failed:.0f} of {progress.last['groups/ended']:.0f}")
        if progress.bottleneck is not None:
            table.add_row("speed", str(progress.bottleneck))
        table.add_row("time", format_clock(time.monotonic() - self._started))
        for folder in (self._paths.metrics_dir, self._paths.samples_dir, self._paths.weights_dir, self._paths.logs_dir):
            table.add_row(folder.name, f"{folder}/")
        table.add_row("view", f"{uv_run()}page {shlex.quote(str(self._paths.root))}")
        if versions := steps_in(self._paths.weights_dir):
            model = self._paths.weights(versions[-1])
            if (model / "adapter_config.json").exists():
                table.add_row("adapter", f"{model} (peft's format)")
                return table
            table.add_row("serve", f"{uv_run()}inference --model.name {shlex.quote(str(model))}")
        return table

    def show_event(self, text: str) -> None:
        """Print an event of the run above the display, with control characters escaped."""
        self._console.print(Text(escape_control_chars(text)), soft_wrap=True)
        self.display.note(text)

    def _show(self, step: Mapping[str, Any]) -> None:
        if self._resumes:
            self._resumes = False
            self.show_event(f"resumed after step {step['step']}")
        if self._is_live:
            return
        figures = " | ".join(f"{label} {format_number(step.get(name))}" for label, name in _FIGURES.items())
        if (eta := self.progress.eta_seconds(self._max_steps)) is not None:
            figures += f" | ETA {format_clock(eta)}"
        total = f"/{self._max_steps}" if self._max_steps else ""
        elapsed = format_clock(time.monotonic() - self._started)
        name = f"{self._name} | " if self._name else ""
        self._console.print(f"{elapsed} | {name}step {step['step'] + 1}{total} | {figures}", soft_wrap=True)


def is_live(console: Console) -> bool:
    """Return whether a live display is possible. A pipe is no terminal, also with FORCE_COLOR."""
    return console.is_interactive and console.file.isatty()


async def follow(runs: Sequence[ConsoleProgress], console: Console, folders: Sequence[RunPaths]) -> None:
    """Show the steps of all runs until cancelled, and before the first step what each process does.

    `folders` are the directories of the run: of several runs, the trainer's first.
    """
    start = StartDisplay(ProcessActivities(folders), console)
    live = Live(Group(start, *(run.display for run in runs)), console=console, transient=True)
    with live if is_live(console) else nullcontext():
        async with asyncio.TaskGroup() as tasks:
            for run in runs:
                tasks.create_task(run.follow())
            while not any(run.has_new_steps for run in runs):
                start.refresh()
                await asyncio.sleep(_ACTIVITY_SECONDS)
            start.clear()


class StartDisplay:
    """What each process does until the first step: rows of the live display, otherwise a line for each new phase."""

    def __init__(self, activities: ProcessActivities, console: Console) -> None:
        self._activities, self._console = activities, console
        self._rows: list[Activity] = []
        self._shown: dict[str, str] = {}
        self._started = time.monotonic()

    def refresh(self) -> None:
        """Read what the processes do, and print what is new."""
        self._rows = self._activities.read()
        if is_live(self._console):
            return
        for row in self._rows:
            if self._shown.get(row.names[0]) != row.phase:
                self._shown |= dict.fromkeys(row.names, row.phase)
                clock = format_clock(time.monotonic() - self._started)
                self._console.print(f"{clock} | {escape_control_chars(f'{row.who}: {row.phase}')}", soft_wrap=True)

    def clear(self) -> None:
        """Show nothing any more."""
        self._rows = []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a row for each process."""
        grid = Table.grid(padding=(0, 1))
        for row in self._rows:
            texts = (row.who, row.phase, format_clock(row.seconds), f"<- {row.waiting_for}" if row.waiting_for else "")
            grid.add_row(*(Text(escape_control_chars(text)) for text in texts))
        yield grid


class LiveDisplay:
    """Rows for step, reward, staleness, waits and the last event; each one fits on one line of a narrow terminal.

    It shows no text of a model or an environment without escaping it.
    """

    def __init__(self, progress: RunProgress, max_steps: int | None, name: str = "") -> None:
        self._progress, self._max_steps, self._started = progress, max_steps, time.monotonic()
        self._name = name
        self._event = "starting"

    def note(self, event: str) -> None:
        """Set the last event: its first line, with control characters escaped."""
        clock = time.strftime("%H:%M:%S")
        self._event = f"{clock} {escape_control_chars(event.strip().partition(chr(10))[0])}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the rows."""
        blocks = _BLOCKS if options.encoding.startswith("utf") else _ASCII_BLOCKS
        grid = Table.grid(padding=(0, 1))
        grid.add_column(style="bold", no_wrap=True, min_width=_LABEL_WIDTH)
        grid.add_column(no_wrap=True, overflow="crop")
        if self._name:
            grid.add_row(self._name, "")
        if self._max_steps:
            grid.add_row("", ProgressBar(self._max_steps, min(self._progress.steps, self._max_steps), _SPARKLINE_WIDTH))
        for label, text in self._rows(blocks).items():
            grid.add_row(label, Text(text))
        yield grid

    def _rows(self, blocks: str) -> dict[str, str]:
        progress, last = self._progress, self._progress.last
        total = f" of {self._max_steps}" if self._max_steps else ""
        eta = progress.eta_seconds(self._max_steps)
        clock = format_clock(time.monotonic() - self._started)
        rewards = progress.rewards
        reward = format_number(rewards[-1] if rewards else None)
        waits = ", ".join(f"{who} {share:.0%}" for who, share in progress.waits().items())
        return {
            "step": f"{progress.steps}{total} in {clock}" + (f", ETA {format_clock(eta)}" if eta is not None else ""),
            "reward": f"{reward} {sparkline(rewards, _SPARKLINE_WIDTH, blocks)}",
            "staleness": f"{format_number(last.get('staleness/max'))}, largest {format_number(progress.staleness)}",
            "loss": f"{format_number(last.get('loss'))}, {format_number(last.get('perf/tokens_per_second'))} tokens/s",
            "waits": waits or "-",
            "event": self._event,
        }


def sparkline(values: Sequence[float], width: int, blocks: str = _BLOCKS) -> str:
    """Draw values as at most `width` characters, from the lowest to the highest block; more values are averaged."""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    if not means:
        return ""
    low, span = min(means), max(means) - min(means)
    return "".join(blocks[round((value - low) / span * (len(blocks) - 1)) if span else 0] for value in means)
