"""The live display of `rl` on a terminal; it shows no text of a model or an environment without escaping it."""

import time
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from prime_rl.core.terminal_escape import escape_control_chars
from prime_rl.supervisor.console.run_progress import RunProgress, format_clock, format_number

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = ".:-=+*#@"
_SPARKLINE_WIDTH = 40
_LABEL_WIDTH = 9


class LiveDisplay:
    """Rows for step, reward, staleness, waits and the last event; each one fits on one line of a narrow terminal."""

    def __init__(self, progress: RunProgress, max_steps: int | None) -> None:
        self._progress, self._max_steps, self._started = progress, max_steps, time.monotonic()
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
