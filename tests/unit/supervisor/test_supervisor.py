"""`rl` over real processes and signals: a run ends soon, names the culprit, and leaves no process behind (I7)."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.command import PROGRESS_TIMEOUT_S, alive, until

IMPORTS = "from prime_rl.core.entry_point import run_main\nfrom prime_rl.core.errors import ConfigError\n"
FOREVER = "import time, os; print('up', os.getpid(), flush=True); time.sleep(600)"
DONE = "print('done')"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
ORPHANER = """
import os, signal, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
print("orphan", child.pid, flush=True)
"""
REPORT = """
import json, os, pathlib
path = pathlib.Path(os.environ["METRICS"]); path.parent.mkdir(parents=True, exist_ok=True)
path.write_text("".join(json.dumps({"step": n, **row}) + "\\n" for n, row in enumerate(ROWS)))
"""


class Run:
    """`rl` over small scripts."""

    def __init__(self, output_dir, roles, keys=(), **timeouts):
        self.output_dir = output_dir
        driver = [sys.executable, "-m", "tests.unit.supervisor.driver", str(output_dir)]
        self.process = subprocess.Popen(
            [*driver, json.dumps(roles), json.dumps(timeouts), *keys],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for_log(self, role, text):
        """Wait for a text in the log of a process, and return the complete lines of the log."""
        log = self.output_dir / "logs" / f"{role}.log"

        def lines():
            # `print` without a buffer writes the parts of a line one by one.
            return "".join(log.read_text().rpartition("\n")[:2]) if log.exists() else ""

        def contains():
            ended = self.process.poll() is not None  # read first, because work before the exit counts
            found = text in lines()
            assert found or not ended, f"rl ended before {log} contained {text!r}"
            return found

        until(contains, f"{text!r} in {log}")
        return lines()

    def pids(self):
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def end(self):
        """Wait for the end; return exit code and output."""
        output, _ = self.process.communicate(timeout=PROGRESS_TIMEOUT_S)
        return self.process.returncode, output


def assert_gone(pids):
    """Check that no process is left, except zombies."""
    until(lambda: not any(is_left(pid) for pid in pids), f"the end of the processes {pids}", timeout_s=60)


def is_left(pid):
    try:
        return alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start(tmp_path):
    runs = []

    def _start(roles, **kwargs):
        runs.append(Run(tmp_path / "out", roles, **kwargs))
        return runs[-1]

    yield _start
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()


def test_rl_success_stops_the_server(start):
    until_up = "import os, pathlib, time; log = pathlib.Path(os.environ['RUN']) / 'logs/inference.log'\n"
    until_up += "while not log.read_text().endswith('\\n'): time.sleep(0.02)"
    run = start({"inference": FOREVER, "orchestrator": DONE, "trainer": until_up})
    code, output = run.end()
    assert code == 0
    pid = int((run.output_dir / "logs/inference.log").read_text().split()[1])
    assert_gone([pid])
    assert "logs" in output


@pytest.mark.parametrize("victim", ["inference", "orchestrator", "trainer"])
def test_rl_killed_process_stops_the_others_and_is_named(start, victim):
    run = start({"inference": FOREVER, "orchestrator": FOREVER, "trainer": FOREVER})
    for role in ("inference", "orchestrator", "trainer"):
        run.wait_for_log(role, "up")
    pids = run.pids()
    assert len(pids) == 3
    os.kill(int((run.output_dir / f"logs/{victim}.log").read_text().split()[1]), signal.SIGKILL)
    code, output = run.end()
    assert code == 1
    assert f"error: {victim} was killed by SIGKILL; log {run.output_dir}/logs/{victim}.log" in output
    assert_gone(pids)


def test_rl_failed_process_prints_the_end_of_its_log(start):
    script = "for i in range(100): print('line', i)\nraise SystemExit(3)"
    run = start({"inference": FOREVER, "orchestrator": script, "trainer": FOREVER})
    code, output = run.end()
    assert code == 1
    assert "line 99" in output
    assert "line 10\n" not in output
    assert "error: orchestrator exited with code 3; log " in output


def test_rl_exception_behind_a_launcher_is_reported(start):
    inner = "from prime_rl.core.entry_point import run_main\ndef main(): raise ValueError('no\\nluck')\nrun_main(main)"
    script = f"import subprocess, sys; sys.exit(bool(subprocess.run([sys.executable, '-c', {inner!r}]).returncode))"
    code, output = start({"orchestrator": FOREVER, "trainer": script}).end()
    assert code == 1
    assert "error: trainer exited with code 1: ValueError: no luck; log " in output


def test_rl_bad_input_of_a_process_exits_with_2(start):
    script = f"{IMPORTS}def main(): raise ConfigError('fix this')\nrun_main(main)"
    code, output = start({"orchestrator": script, "trainer": FOREVER}).end()
    assert code == 2
    assert "error: orchestrator: fix this (log " in output
    assert "Traceback" not in output


def test_rl_server_that_exits_fails_the_run(start):
    code, output = start({"inference": DONE, "orchestrator": FOREVER, "trainer": FOREVER}).end()
    assert code == 1
    assert "error: inference exited with code 0 before the run was over" in output


def test_rl_effect_before_its_cause_names_the_cause(start):
    """The orchestrator fails first, because the server it talked to is dying."""
    dying = "import os, pathlib, time; events = pathlib.Path(os.environ['RUN']) / 'events.jsonl'\n"
    dying += (
        "while not events.exists() or '\"ended\"' not in events.read_text(): time.sleep(0.02)\nos.kill(os.getpid(), 9)"
    )
    roles = {"inference": dying, "orchestrator": "raise SystemExit(1)", "trainer": FOREVER}
    code, output = start(roles, culprit_seconds=600.0).end()
    assert code == 1
    assert "error: inference was killed by SIGKILL" in output


def test_rl_process_that_does_not_exit_after_the_last_step_is_named(start):
    code, output = start({"orchestrator": FOREVER, "trainer": DONE}, exit_seconds=1.0).end()
    assert code == 1
    assert "error: orchestrator did not exit after the last step" in output


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_rl_signal_stops_all_processes(start, number, expected):
    run = start({"inference": FOREVER, "orchestrator": FOREVER, "trainer": FOREVER})
    for role in ("inference", "orchestrator", "trainer"):
        run.wait_for_log(role, "up")
    pids = run.pids()
    run.process.send_signal(number)
    code, output = run.end()
    assert code == expected
    assert "all processes have ended" in output
    assert "Traceback" not in output
    assert_gone(pids)


def test_rl_orphans_and_processes_that_ignore_sigterm_are_killed(start):
    """The orphan leads its own session and its parent exited with code 0."""
    run = start({"inference": STUBBORN, "orchestrator": ORPHANER, "trainer": FOREVER}, stop_seconds=2.0)
    orphan = int(run.wait_for_log("orchestrator", "orphan").split()[1])
    run.wait_for_log("inference", "up")
    run.wait_for_log("trainer", "up")
    until(lambda: orphan in run.pids(), "its adoption")  # from the exit of its parent until then it is in no list
    pids, begin = run.pids(), time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    code, _ = run.end()
    assert code == 143
    assert time.monotonic() - begin >= 2.0, "not before the time for an orderly exit"
    assert_gone([*pids, orphan])


def test_rl_second_ctrl_c_skips_the_stop_timeout(start):
    run = start({"orchestrator": STUBBORN, "trainer": FOREVER}, stop_seconds=600.0)
    run.wait_for_log("orchestrator", "up")
    run.wait_for_log("trainer", "up")
    run.process.send_signal(signal.SIGINT)
    events = run.output_dir / "events.jsonl"
    until(lambda: "stopped by SIGINT" in events.read_text(), "the first signal")  # the kernel joins equal signals
    run.process.send_signal(signal.SIGINT)
    code, _ = run.end()
    assert code == 130


def test_rl_killed_takes_its_children_with_it(start):
    run = start({"inference": STUBBORN, "orchestrator": FOREVER, "trainer": FOREVER})
    for role in ("inference", "orchestrator", "trainer"):
        run.wait_for_log(role, "up")
    pids = run.pids()
    run.process.kill()
    assert_gone(pids)


def test_rl_full_disk_ends_the_run(start, tmp_path):
    """The orchestrator's log is on a device that is always full."""
    (tmp_path / "out/logs").mkdir(parents=True)
    (tmp_path / "out/logs/orchestrator.log").symlink_to("/dev/full")
    run = start({"inference": FOREVER, "orchestrator": "print('x' * 100000, flush=True)", "trainer": FOREVER})
    code, output = run.end()
    assert code == 1
    assert "error: orchestrator exited with code 1" in output


def test_rl_prints_steps_and_summary_from_the_metrics(start):
    shipped = [{"reward/mean": 0.1 * n, "staleness/max": n, "tokens/wasted": 0} for n in range(3)]
    trained = [{"loss": 0.5, "perf/tokens_per_second": 1234.5} for _ in range(3)]
    roles = {
        "orchestrator": REPORT.replace("ROWS", repr(shipped)),
        "trainer": REPORT.replace("ROWS", repr(trained)) + "import time; time.sleep(1)",
    }
    code, output = start(roles).end()
    assert code == 0
    assert "step 3/3 | reward 0.2 | loss 0.5 | staleness 2 | tokens/s 1234" in output
    assert "3 of 3" in output
    assert "0.100 (first 3 steps) -> 0.100 (last 5)" in output


def test_rl_second_run_in_a_directory_is_rejected(start):
    first = start({"orchestrator": FOREVER, "trainer": FOREVER})
    first.wait_for_log("trainer", "up")
    second = start({"orchestrator": DONE, "trainer": DONE})
    code, output = second.end()
    assert code == 2
    assert f"(process {first.process.pid})" in output
    assert first.process.poll() is None
    first.process.send_signal(signal.SIGKILL)
    first.end()
    assert start({"orchestrator": DONE, "trainer": DONE}).end()[0] == 0
