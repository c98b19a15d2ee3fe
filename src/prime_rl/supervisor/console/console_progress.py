"""The console output of `rl`: a live display or one line per step, and a table at the end."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prime_rl.core.terminal_escape import escape_control_chars
from prime_rl.monitors.learning_signal import LearningSignalMonitor
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.wait_for import watch_directory
from prime_rl.supervisor.console.live_display import LiveDisplay
from prime_rl.supervisor.console.run_progress import ROLES, JsonTail, RunProgress, format_clock, format_number

_FIGURES = {"reward": "reward/mean", "loss": "loss", "staleness": "staleness/max", "tokens/s": "perf/tokens_per_second"}


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

    Steps before a resume count in the summary and are not shown again.
    """

    def __init__(self, paths: RunPaths, max_steps: int | None, console: Console) -> None:
        self.progress = RunProgress()
        self._tails = {role: JsonTail(paths.metrics(role)) for role in ROLES}
        self._paths, self._max_steps, self._console = paths, max_steps, console
        self._signal = LearningSignalMonitor()
        self._warnings = JsonTail(paths.warnings)
        list(self._warnings.read())  # skip those of an earlier process
        self._resumes = self._read_earlier_steps()
        self._started = time.monotonic()
        # A pipe is no terminal, also with FORCE_COLOR.
        self._is_live = console.is_interactive and console.file.isatty()
        self._display = LiveDisplay(self.progress, max_steps)

    async def follow(self) -> None:
        """Show steps until cancelled."""
        live = Live(self._display, console=self._console, transient=True)
        with live if self._is_live else nullcontext():
            async for _ in watch_directory(self._paths.metrics_dir, asyncio.Event()):
                self.refresh()

    def refresh(self) -> None:
        """Show the lines written since the last call."""
        for warning in self._warnings.read():
            self._warn(warning["text"])
        for role, lines in self._tails.items():
            for metrics in lines.read():
                if role == "orchestrator" and (text := self._signal.add(metrics)) is not None:
                    self._warn(text)
                for step in self.progress.add(role, metrics):
                    self._show(step)

    def _read_earlier_steps(self) -> bool:
        """Count the steps of an earlier start of the run; return whether there are any."""
        for role, lines in self._tails.items():
            for metrics in lines.read():
                list(self.progress.add(role, metrics))
        self.progress.restart_clock()
        return self.progress.steps > 0

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
        table.add_row("steps", f"{progress.steps}" + (f" of {self._max_steps}" if self._max_steps else ""))
        if progress.rewards:
            first, last = mean(progress.rewards[:3]), mean(progress.rewards[-5:])
            table.add_row("reward", f"{first:.3f} (first 3 steps) -> {last:.3f} (last 5)")
        table.add_row("staleness, largest", format_number(progress.staleness))
        table.add_row("tokens wasted", format_number(progress.wasted))
        table.add_row("time", format_clock(time.monotonic() - self._started))
        for folder in (self._paths.metrics_dir, self._paths.samples_dir, self._paths.weights_dir, self._paths.logs_dir):
            table.add_row(folder.name, f"{folder}/")
        return table

    def show_event(self, text: str) -> None:
        """Print an event of the run above the display, with control characters escaped."""
        self._console.print(Text(escape_control_chars(text)), soft_wrap=True)
        self._display.note(text)

    def _warn(self, text: str) -> None:
        self.show_event(f"warning: {text}")

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
        self._console.print(f"{elapsed} | step {step['step'] + 1}{total} | {figures}", soft_wrap=True)
