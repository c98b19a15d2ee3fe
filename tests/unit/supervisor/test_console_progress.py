"""Console output of a run, from its metrics: lines, the live display, and `rl` in a pseudo terminal."""

import io
import json
import os
import pty
import select
import shlex
import socket
import sys
import termios
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console

from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.console_progress import ConsoleProgress, LiveDisplay, StartDisplay, sparkline
from prime_rl.supervisor.doctor.diagnosis import examine
from prime_rl.supervisor.run_progress import ProcessActivities, RunProgress
from tests.support.command import PROGRESS_TIMEOUT_SECONDS


def test_console_progress_summary_counts_lost_tokens_and_failed_groups(tmp_path):
    """Calls outside the turns of a rollout, as of a simulated user, are not lost."""
    paths, out = RunPaths(tmp_path), io.StringIO()
    paths.metrics_dir.mkdir()
    row = {"step": 0, "reward/mean": 0.0, "tokens/unaccounted": 0, "tokens/lost/unused": 500}
    row |= {"tokens/lost/failed": 80, "tokens/lost/replayed": 5, "groups/failed": 25, "groups/ended": 89}
    display = ConsoleProgress(paths, 10, console := Console(file=out, width=200))
    for role in ("orchestrator", "trainer"):
        paths.metrics(role).write_text(json.dumps(row) + "\n")
    display.refresh()
    console.print(display.summary())
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert ["tokens", "lost", "85"] in rows
    assert ["groups", "failed", "25", "of", "89"] in rows


def test_summary_names_commands_that_run_outside_the_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "weights" / "step_1").mkdir(parents=True)
    console = Console(file=io.StringIO(), width=300)
    console.print(ConsoleProgress(RunPaths(Path("out")), 10, console).summary())
    command = f"uv run --project {shlex.quote(str(Path(__file__).parents[3]))}"
    assert f"{command} page out" in console.file.getvalue()
    assert f"{command} inference --model.name out/weights/step_1" in console.file.getvalue()


def test_console_progress_shows_new_warnings_and_none_of_an_earlier_process(tmp_path):
    paths, out = RunPaths(tmp_path), io.StringIO()
    paths.warnings.parent.mkdir(parents=True)
    paths.warnings.write_text(json.dumps({"text": "of the process before"}) + "\n")
    display = ConsoleProgress(paths, 10, Console(file=out, width=20))
    display.refresh()
    with paths.warnings.open("a") as file:
        file.write(json.dumps({"text": "environment [red]: group 0 failed: NameError: name 'x' is not defined"}) + "\n")
    display.refresh()
    display.refresh()
    assert out.getvalue() == "warning: environment [red]: group 0 failed: NameError: name 'x' is not defined\n"


@pytest.mark.extended
def test_console_progress_and_doctor_name_a_rank_that_stays_slow_and_its_host(tmp_path, request):
    paths, out = RunPaths(tmp_path), io.StringIO()
    paths.metrics_dir.mkdir()
    beat = HeartbeatWriter(paths, "trainer_3", "trainer")
    beat.start()
    request.addfinalizer(beat.close)
    host = socket.gethostname()
    display = ConsoleProgress(paths, None, Console(file=out, width=20))
    shown = []
    # A rank that is slow by chance, then another one that stays slow.
    slowest = [(step % 4, 1.5) for step in range(12)] + [(3, 1.1)] * 10 + [(3, 1.5)] * 25
    for step, (rank, factor) in enumerate(slowest):
        row = {"step": step, "time/step": 1.0, "rank/slowest": rank, "rank/slowdown": factor}
        with paths.metrics("trainer").open("a") as file:
            file.write(json.dumps(row) + "\n" + json.dumps({"step": step, "val/loss": 1.0}) + "\n")
        display.refresh()
        shown.append(out.getvalue())
        noted = [note for note in examine(paths).notes if "is slow" in note] if step in (20, len(slowest) - 1) else []
        assert bool(noted) == (step == len(slowest) - 1)
    assert not shown[30] and shown[31] == shown[-1], "after ten steps, once"
    assert f"hint: trainer rank 3 on {host} is slow: in each of the last 10 steps" in shown[-1]
    assert "1.5 times as long as the median rank" in shown[-1] and host in noted[0]


def test_console_progress_shows_a_resumed_run_from_its_first_new_step(tmp_path):
    paths, out = RunPaths(tmp_path), io.StringIO()
    paths.metrics_dir.mkdir()

    def write(rewards):
        for role in ("orchestrator", "trainer"):
            new = tmp_path / role
            new.write_text("".join(json.dumps({"step": n, "reward/mean": r}) + "\n" for n, r in enumerate(rewards)))
            new.rename(paths.metrics(role))

    write([0.1, 0.2, 0.3])
    display = ConsoleProgress(paths, 3, Console(file=out, width=200))
    display.refresh()
    write([0.1, 0.2])  # the rollback to checkpoint 2
    display.refresh()
    assert (out.getvalue(), display.has_new_steps) == ("", False)
    write([0.1, 0.2, 0.9])
    display.refresh()
    assert display.has_new_steps
    first, second = out.getvalue().splitlines()
    assert first == "resumed after step 2"
    assert "step 3/3 | reward 0.9 " in second and "ETA" not in second
    assert display.progress.rewards == [0.1, 0.2, 0.9]


def test_console_progress_skips_lines_of_evaluations(tmp_path):
    paths, out = RunPaths(tmp_path), io.StringIO()
    display = ConsoleProgress(paths, 10, Console(file=out, width=200))
    paths.metrics("orchestrator").parent.mkdir(parents=True)
    shipped = [{"step": 0, "reward/mean": 0.25, "staleness/max": 0.0}, {"step": 0, "eval/words/reward/mean": 0.75}]
    paths.metrics("orchestrator").write_text("".join(json.dumps(line) + "\n" for line in shipped))
    paths.metrics("trainer").write_text(json.dumps({"step": 0, "loss": 0.5}) + "\n")
    display.refresh()
    assert "step 1/10 | reward 0.25 " in out.getvalue()


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


def test_console_progress_of_several_runs_names_each(tmp_path):
    out = io.StringIO()
    console = Console(file=out, width=200, highlight=False, markup=False)
    for name in ("run_a", "run_b"):
        paths = RunPaths(tmp_path / name)
        paths.metrics("trainer").parent.mkdir(parents=True)
        display = ConsoleProgress(paths, 2, console, name)
        for role, rows in (("trainer", TRAINED), ("orchestrator", SHIPPED)):
            paths.metrics(role).write_text(json.dumps({"step": 0, **rows[0]}) + "\n")
        display.refresh()
        console.print(display.summary())
    lines = out.getvalue().splitlines()
    assert [line.split(" | ")[1:3] for line in lines if " | " in line] == [["run_a", "step 1/2"], ["run_b", "step 1/2"]]
    assert [line.split()[1] for line in lines if line.startswith("run ")] == ["run_a", "run_b"]
    assert "run_a" in render(LiveDisplay(RunProgress(), 2, "run_a"))


def test_console_progress_names_the_bottleneck_every_ten_steps_and_at_the_end(tmp_path):
    paths, out = RunPaths(tmp_path), io.StringIO()
    display = ConsoleProgress(paths, 25, console := Console(file=out, width=300))
    paths.metrics_dir.mkdir()
    row = {"time/step": 2, "reward/mean": 0.5, "time/wait_for_batch": 1, "time/train": 1, "time/wait_for_policy": 0}
    rows = [{"step": n, "time": 2.0 * n, **row} for n in range(25)]
    for role in ("orchestrator", "trainer"):
        paths.metrics(role).write_text("".join(json.dumps(row) + "\n" for row in rows))
    display.refresh()
    lines = out.getvalue().splitlines()
    found = [n for n, line in enumerate(lines) if line.startswith("inference is the bottleneck")]
    assert found == [10, 21] and "step 10/25" in lines[9]
    console.print(display.summary())
    assert "speed" in out.getvalue()


@pytest.mark.parametrize(("event", "cause"), [
    (None, "checkpoint"), ({"name": "trainer"}, "inference"), ({"name": "run_a"}, "inference"),
    ({"name": "run_b"}, "checkpoint"),
])  # fmt: skip
def test_console_progress_counts_no_downtime_of_a_restart(tmp_path, event, cause):
    paths, trainer = RunPaths(tmp_path / "run_a"), RunPaths(tmp_path)
    display = ConsoleProgress(paths, 25, Console(file=io.StringIO()))
    paths.metrics_dir.mkdir(parents=True)
    row = {"time/step": 2, "reward/mean": 0.5, "time/wait_for_batch": 0.5, "time/train": 1}
    row["time/wait_for_policy"] = 1 if cause == "checkpoint" else 0

    def write(steps, pause):
        for role in ("orchestrator", "trainer"):
            with paths.metrics(role).open("a") as file:
                file.write("".join(json.dumps({"step": n, "time": pause + 2.0 * n, **row}) + "\n" for n in steps))
        display.refresh()

    write(range(5), 0)
    if event is not None:
        trainer.events.write_text(json.dumps({"time": 300.0, "event": "restarted", **event}) + "\n")
    write(range(5, 10), 600)
    assert display.progress.bottleneck.cause == cause


def test_start_display_shows_each_process_from_its_start_and_ranks_together(tmp_path):
    run, paths, out = RunPaths(tmp_path / "run_a"), RunPaths(tmp_path), io.StringIO()
    start = {"time": time.time() - 7, "event": "started", "name": "trainer", "pid": 1}
    paths.events.parent.mkdir(exist_ok=True)
    paths.events.write_text(json.dumps(start) + "\n")
    run.root.mkdir()
    activities, of_page = ProcessActivities([paths, run]), ProcessActivities([paths])
    [first] = activities.read()
    assert (first.who, first.phase) == ("trainer", "start") and first.seconds == pytest.approx(7, abs=2)
    display = StartDisplay(activities, Console(file=out, width=100))
    display.refresh()
    with ExitStack() as stack:
        for rank in range(3):
            heartbeat = HeartbeatWriter(paths, f"trainer_{rank}", "trainer")
            heartbeat.enter_imports("torch")
            stack.enter_context(heartbeat)
        own = stack.enter_context(HeartbeatWriter(run, "orchestrator", "orchestrator"))
        own.enter("wait for version 1", waiting_for="trainer")
        own._write()
        rows = {row.who: row for row in activities.read()}
        assert {who: row.phase for who, row in rows.items()} == {
            "trainer_0 and 2 more": "import torch", "run_a/orchestrator": "wait for version 1",
        }  # fmt: skip
        assert rows["run_a/orchestrator"].waiting_for == "trainer"
        with paths.events.open("a") as file:
            file.write(json.dumps(start | {"name": "run_a"}) + "\n")
        assert {row.who: row.phase for row in of_page.read()} == {who: row.phase for who, row in rows.items()}
        display.refresh()
        display.refresh()
    assert [line.partition(" | ")[2] for line in out.getvalue().splitlines()] == [
        "trainer: start", "run_a/orchestrator: wait for version 1", "trainer_0 and 2 more: import torch",
    ]  # fmt: skip
    assert activities.read() == [], "all have ended"


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
        deadline = time.monotonic() + PROGRESS_TIMEOUT_SECONDS
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
