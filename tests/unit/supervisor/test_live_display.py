"""The live display: its rows, and `rl` in a pseudo terminal."""

import io
import json
import os
import pty
import select
import sys
import termios
import time

import pytest
from rich.console import Console

from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.console.console_progress import ConsoleProgress
from prime_rl.supervisor.console.live_display import LiveDisplay, sparkline
from prime_rl.supervisor.console.run_progress import RunProgress
from tests.support.command import PROGRESS_TIMEOUT_S

REPORT = """
import json, os, pathlib, time
path = pathlib.Path(os.environ["METRICS"]); path.parent.mkdir(parents=True, exist_ok=True)
path.write_text("".join(json.dumps({"step": n, **row}) + "\\n" for n, row in enumerate(ROWS)))
time.sleep(600)
"""
TRAINED = [{"loss": 0.5, "time/step": 2.0, "time/wait_for_batch": 0.5, "perf/tokens_per_second": 1234.0}] * 2
SHIPPED = [{"reward/mean": reward, "staleness/max": 1, "time/step": 2.0} for reward in (0.25, 0.75)]


def add_steps(progress, steps=2):
    for step in range(steps):
        shipped = {"step": step, "time/wait_for_policy": 1.0, **SHIPPED[step]}
        for role, row in (("trainer", {"step": step, **TRAINED[step]}), ("orchestrator", shipped)):
            list(progress.add(role, row))


def render(display, width=60, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=file, width=width, highlight=False, color_system=None).print(display)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([0, 1], "▁█"),
        ([2, 2, 2], "▁▁▁"),
        ([0, 0, 1, 1, 3, 3, 7, 7], "▁▂▄█"),
        ([-1, 0, 1], "▁▅█"),
    ],
)
def test_sparkline_shows_means_from_lowest_to_highest(values, line):
    assert sparkline(values, 4) == line


def test_live_display_shows_step_reward_staleness_and_waits():
    progress = RunProgress()
    display = LiveDisplay(progress, 40)
    assert "0 of 40" in render(display)
    add_steps(progress)
    display.note("inference restarted\nmore")
    text = render(display)
    assert "2 of 40" in text and "ETA" in text
    assert "0.75 ▁█" in text
    assert "1, largest 1" in text
    assert "trainer for batches 25%, sampling for weights 50%" in text
    assert "0.5, 1234 tokens/s" in text
    assert "inference restarted" in text and "more" not in text


def test_live_display_of_a_narrow_terminal_has_one_line_per_row():
    progress = RunProgress()
    add_steps(progress)
    display = LiveDisplay(progress, 40)
    display.note("x" * 500)
    lines = render(display, width=30).splitlines()
    assert len(lines) == 7
    assert max(map(len, lines)) <= 30


def test_live_display_escapes_hostile_events_and_draws_ascii_where_needed():
    progress = RunProgress()
    add_steps(progress)
    display = LiveDisplay(progress, None)
    display.note("bad \x1b]0;title\x07 [red] \u202egnp")
    assert "bad \\x1b]0;title\\x07 [red] \\u202egnp" in render(display, width=100)
    assert "0.75 .@" in render(display, encoding="ascii")


def test_console_progress_in_a_pipe_prints_lines_also_with_forced_colors(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    paths, out = RunPaths(tmp_path), io.StringIO()
    display = ConsoleProgress(paths, 2, Console(file=out, width=200, highlight=False, markup=False))
    paths.metrics("trainer").parent.mkdir(parents=True)
    for role, rows in (("trainer", TRAINED), ("orchestrator", SHIPPED)):
        paths.metrics(role).write_text("".join(json.dumps({"step": n, **row}) + "\n" for n, row in enumerate(rows)))
    display.refresh()
    first, second = out.getvalue().splitlines()
    assert "| step 1/2 | reward 0.25 | loss 0.5 | staleness 1 | tokens/s 1234" in first
    assert "| step 2/2 | reward 0.75" in second


class Terminal:
    """`rl` over small scripts as the foreground process of a pseudo terminal."""

    def __init__(self, output_dir, roles):
        command = [sys.executable, "-m", "tests.unit.supervisor.driver", str(output_dir), json.dumps(roles), "{}"]
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", "PYTHONUTF8": "1"}
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, command, environment)
        self.settings = termios.tcgetattr(self.master)
        self.output = ""

    def read_until(self, *texts):
        """Read until the output contains all texts, or to its end without any."""
        deadline = time.monotonic() + PROGRESS_TIMEOUT_S
        while not texts or not all(text in self.output for text in texts):
            assert time.monotonic() < deadline, self.output
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.output += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # the last process has closed the terminal
                    assert not texts, self.output
                    return


def test_rl_in_a_terminal_is_live_and_leaves_it_usable_after_ctrl_c(tmp_path):
    paths = RunPaths(tmp_path / "out")
    forever = "import time; time.sleep(600)"
    roles = {
        "inference": forever,
        "orchestrator": f"ROWS = {SHIPPED!r}\n{REPORT}",
        "trainer": f"ROWS = {TRAINED!r}\n{REPORT}",
    }
    terminal = Terminal(paths.root, roles)
    try:
        terminal.read_until("2 of 3", "▁█", "trainer for batches 25%")
        assert "\x1b[?25l" in terminal.output, "the cursor is hidden while the display is drawn"
        seen = len(terminal.output)
        with paths.warnings.open("a") as file:
            file.write(json.dumps({"text": "hostile \x1b[31m[bold] text"}) + "\n")
        paths.metrics("trainer").touch()
        terminal.read_until("warning: hostile \\x1b[31m[bold] text\r\n", "event")
        above = terminal.output.index("warning: hostile", seen)
        os.write(terminal.master, b"\x03")
        terminal.read_until("stopped by SIGINT")
        assert "staleness" in terminal.output[above:], "the display is drawn again below the warning"
        terminal.read_until()
    finally:
        os.close(terminal.master)
    _, status = os.waitpid(terminal.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert terminal.output.rindex("\x1b[?25h") > terminal.output.rindex("\x1b[?25l")
    assert "\x1b[31m" not in terminal.output
