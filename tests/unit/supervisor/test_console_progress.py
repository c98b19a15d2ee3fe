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
from tests.unit.supervisor.test_supervisor import FOREVER, REPORT


def write_steps(paths, *rows, first=0, roles=("orchestrator", "trainer")):
    """Append rows of steps to the metrics of processes."""
    paths.metrics_dir.mkdir(parents=True, exist_ok=True)
    for role in roles:
        with paths.metrics(role).open("a") as file:
            file.write("".join(json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows, first)))


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


def console(width=200):
    return Console(file=io.StringIO(), width=width, highlight=False, markup=False)


def test_console_progress_summary_counts_lost_tokens_and_failed_groups(paths):
    """Calls outside the turns of a rollout, as of a simulated user, are not lost."""
    row = {"reward/mean": 0.0, "tokens/unaccounted": 0, "tokens/lost/unused": 500}
    row |= {"tokens/lost/failed": 80, "tokens/lost/replayed": 5, "groups/failed": 25, "groups/ended": 89}
    write_steps(paths, row)
    display = ConsoleProgress(paths, 10, out := console())
    display.refresh()
    out.print(display.summary())
    rows = [line.split() for line in out.file.getvalue().splitlines()]
    assert ["tokens", "lost", "85"] in rows
    assert ["groups", "failed", "25", "of", "89"] in rows


def test_summary_names_commands_that_run_outside_the_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "weights" / "step_1").mkdir(parents=True)
    out = console(300)
    out.print(ConsoleProgress(RunPaths(Path("out")), 10, out).summary())
    command = f"uv run --project {shlex.quote(str(Path(__file__).parents[3]))}"
    assert f"{command} page out" in out.file.getvalue()
    assert f"{command} inference --model.name out/weights/step_1" in out.file.getvalue()


def test_console_progress_shows_new_warnings_and_none_of_an_earlier_process(paths):
    paths.warnings.parent.mkdir(parents=True)
    paths.warnings.write_text(json.dumps({"text": "of the process before"}) + "\n")
    display = ConsoleProgress(paths, 10, out := console(20))
    display.refresh()
    with paths.warnings.open("a") as file:
        file.write(json.dumps({"text": "environment [red]: group 0 failed: NameError: name 'x' is not defined"}) + "\n")
    display.refresh()
    display.refresh()
    expected = "warning: environment [red]: group 0 failed: NameError: name 'x' is not defined\n"
    assert out.file.getvalue() == expected


@pytest.mark.extended
def test_console_progress_and_doctor_name_a_rank_that_stays_slow_and_its_host(paths):
    host = socket.gethostname()
    display, shown = ConsoleProgress(paths, None, out := console(20)), []
    # A rank that is slow by chance, then another one that stays slow.
    slowest = [(step % 4, 1.5) for step in range(12)] + [(3, 1.1)] * 10 + [(3, 1.5)] * 15
    with HeartbeatWriter(paths, "trainer_3", "trainer"):
        for step, (rank, factor) in enumerate(slowest):
            row = {"time/step": 1.0, "rank/slowest": rank, "rank/slowdown": factor}
            write_steps(paths, row, first=step)
            write_steps(paths, {"val/loss": 1.0}, first=step)
            display.refresh()
            shown.append(out.file.getvalue().count("hint: "))
            if step == 20:
                assert not any("is slow" in note for note in examine(paths).notes)
        [note] = [note for note in examine(paths).notes if "is slow" in note]
    assert (shown[30], shown[31], shown[-1]) == (0, 1, 1), "after ten steps, once"
    assert f"hint: trainer rank 3 on {host} is slow: in each of the last 10 steps" in out.file.getvalue()
    assert "1.5 times as long as the median rank" in out.file.getvalue() and host in note


def test_console_progress_shows_a_resumed_run_from_its_first_new_step(paths):
    def rewrite(*rewards):
        for role in ("orchestrator", "trainer"):
            paths.metrics(role).rename(paths.root / role)  # another file takes its place
        write_steps(paths, *({"reward/mean": reward} for reward in rewards))

    write_steps(paths, *({"reward/mean": reward} for reward in (0.1, 0.2, 0.3)))
    display = ConsoleProgress(paths, 3, out := console())
    display.refresh()
    rewrite(0.1, 0.2)  # the rollback to checkpoint 2
    display.refresh()
    assert (out.file.getvalue(), display.has_new_steps) == ("", False)
    rewrite(0.1, 0.2, 0.9)
    display.refresh()
    assert display.has_new_steps
    first, second = out.file.getvalue().splitlines()
    assert first == "resumed after step 2"
    assert "step 3/3 | reward 0.9 " in second and "ETA" not in second
    assert display.progress.rewards == [0.1, 0.2, 0.9]


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
    ("values", "line"), [([], ""), ([2, 2, 2], "▁▁▁"), ([0, 0, 1, 1, 3, 3, 7, 7], "▁▂▄█"), ([-1, 0, 1], "▁▅█")]
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
    for part in (
        "2 of 40", "ETA", "0.75 ▁█", "1, largest 1", "trainer for batches 25%, sampling for weights 50%",
        "0.5, 1234 tokens/s", "inference restarted",
    ):  # fmt: skip
        assert part in text
    assert "more" not in text
    display.note("x" * 500)
    lines = render(display, width=30).splitlines()
    assert len(lines) == 7 and max(map(len, lines)) <= 30, "one line per row"


def test_live_display_escapes_hostile_events_and_draws_ascii_where_needed():
    progress = RunProgress()
    add_steps(progress)
    display = LiveDisplay(progress, None)
    display.note("bad \x1b]0;title\x07 [red] \u202egnp")
    assert "bad \\x1b]0;title\\x07 [red] \\u202egnp" in render(display, width=100)
    assert "0.75 .@" in render(display, encoding="ascii")


def test_console_progress_of_several_runs_prints_a_line_per_step_also_with_forced_colors(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = console()
    for name in ("run_a", "run_b"):
        paths = RunPaths(tmp_path / name)
        display = ConsoleProgress(paths, 2, out, name)
        write_steps(paths, TRAINED[0], roles=["trainer"])
        write_steps(paths, SHIPPED[0], roles=["orchestrator"])
        write_steps(paths, {"eval/words/reward/mean": 0.75}, roles=["orchestrator"])  # no step
        display.refresh()
        out.print(display.summary())
    lines = out.file.getvalue().splitlines()
    assert [line.partition(" | ")[2] for line in lines if " | " in line] == [
        f"{name} | step 1/2 | reward 0.25 | loss 0.5 | staleness 1 | tokens/s 1234" for name in ("run_a", "run_b")
    ]
    assert [line.split()[1] for line in lines if line.startswith("run ")] == ["run_a", "run_b"]
    assert "run_a" in render(LiveDisplay(RunProgress(), 2, "run_a"))


def test_console_progress_names_the_bottleneck_every_ten_steps_and_at_the_end(paths):
    display = ConsoleProgress(paths, 25, out := console(300))
    row = {"time/step": 2, "reward/mean": 0.5, "time/wait_for_batch": 1, "time/train": 1, "time/wait_for_policy": 0}
    write_steps(paths, *({"time": 2.0 * n, **row} for n in range(25)))
    display.refresh()
    lines = out.file.getvalue().splitlines()
    found = [n for n, line in enumerate(lines) if line.startswith("inference is the bottleneck")]
    assert found == [10, 21] and "step 10/25" in lines[9]
    out.print(display.summary())
    assert "speed" in out.file.getvalue()


@pytest.mark.parametrize(
    ("event", "cause"),
    [(None, "checkpoint"), ("trainer", "inference"), ("run_a", "inference"), ("run_b", "checkpoint")],
)
def test_console_progress_counts_no_downtime_of_a_restart(tmp_path, event, cause):
    paths, trainer = RunPaths(tmp_path / "run_a"), RunPaths(tmp_path)
    display = ConsoleProgress(paths, 25, console())
    row = {"time/step": 2, "reward/mean": 0.5, "time/wait_for_batch": 0.5, "time/train": 1}
    row["time/wait_for_policy"] = 1 if cause == "checkpoint" else 0
    write_steps(paths, *({"time": 2.0 * n, **row} for n in range(5)))
    display.refresh()
    if event is not None:
        trainer.events.write_text(json.dumps({"time": 300.0, "event": "restarted", "name": event}) + "\n")
    write_steps(paths, *({"time": 600 + 2.0 * n, **row} for n in range(5, 10)), first=5)
    display.refresh()
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
    roles = {"inference": FOREVER}
    for role, rows in (("orchestrator", SHIPPED), ("trainer", TRAINED)):
        roles[role] = f"{REPORT.replace('ROWS', repr(rows))}\n{FOREVER}"
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
