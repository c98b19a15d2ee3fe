"""`rl` over real processes and signals: a run ends soon, names the culprit, and leaves no process behind (I7)."""

import os
import signal
import time

import psutil
import pytest

from tests.support.command import alive, until

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


def assert_gone(pids):
    """Check that no process is left, except zombies."""
    until(lambda: not any(is_left(pid) for pid in pids), f"the end of the processes {pids}", timeout_seconds=60)


def is_left(pid):
    try:
        return alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def test_rl_success_stops_the_server(start):
    until_up = "import os, pathlib, time; log = pathlib.Path(os.environ['RUN']) / 'logs/inference.log'\n"
    until_up += "while not log.read_text().endswith('\\n'): time.sleep(0.02)"
    run = start({"inference": FOREVER, "orchestrator": DONE, "trainer": until_up})
    code, output = run.end()
    assert code == 0
    pid = int((run.output_dir / "logs/inference.log").read_text().split()[1])
    assert_gone([pid])
    assert "logs" in output


def start_all(start, **roles):
    """Start three processes; return the run and the process ids when all are up."""
    run = start({"inference": FOREVER, "orchestrator": FOREVER, "trainer": FOREVER} | roles)
    for role in ("inference", "orchestrator", "trainer"):
        run.wait_for_log(role, "up")
    pids = run.pids()
    assert len(pids) == 3
    return run, pids


@pytest.mark.extended(after=1)
@pytest.mark.parametrize("victim", ["inference", "orchestrator", "trainer"])
def test_rl_killed_process_stops_the_others_and_is_named(start, victim):
    run, pids = start_all(start)
    os.kill(int((run.output_dir / f"logs/{victim}.log").read_text().split()[1]), signal.SIGKILL)
    code, output = run.end()
    assert code == 1
    assert f"error: {victim} was killed by SIGKILL; log {run.output_dir}/logs/{victim}.log" in output
    assert_gone(pids)


@pytest.mark.extended
def test_rl_failed_process_prints_the_end_of_its_log(start):
    script = "for i in range(100): print('line', i)\nraise SystemExit(3)"
    run = start({"inference": FOREVER, "orchestrator": script, "trainer": FOREVER})
    code, output = run.end()
    assert code == 1
    assert "line 99" in output
    assert "line 10\n" not in output
    assert "error: orchestrator exited with code 3; log " in output


@pytest.mark.extended
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


@pytest.mark.extended
def test_rl_server_that_exits_fails_the_run(start):
    code, output = start({"inference": DONE, "orchestrator": FOREVER, "trainer": FOREVER}).end()
    assert code == 1
    assert "error: inference exited with code 0 before the run was over" in output


@pytest.mark.extended
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


@pytest.mark.extended
def test_rl_process_that_does_not_exit_after_the_last_step_is_named(start):
    code, output = start({"orchestrator": FOREVER, "trainer": DONE}, exit_seconds=1.0).end()
    assert code == 1
    assert "error: orchestrator did not exit after the last step" in output


@pytest.mark.extended(after=1)
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_rl_signal_stops_all_processes(start, number, expected):
    run, pids = start_all(start)
    run.process.send_signal(number)
    code, output = run.end()
    assert code == expected
    assert "all processes have ended" in output
    assert "Traceback" not in output
    assert_gone(pids)


@pytest.mark.extended
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


@pytest.mark.extended
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
    run, pids = start_all(start, inference=STUBBORN)
    run.process.kill()
    assert_gone(pids)


@pytest.mark.extended
def test_rl_full_disk_ends_the_run(start, tmp_path):
    """The orchestrator's log is on a device that is always full."""
    (tmp_path / "out/logs").mkdir(parents=True)
    (tmp_path / "out/logs/orchestrator.log").symlink_to("/dev/full")
    run = start({"inference": FOREVER, "orchestrator": "print('x' * 100000, flush=True)", "trainer": FOREVER})
    code, output = run.end()
    assert code == 1
    assert "error: orchestrator exited with code 1" in output


def test_rl_prints_steps_and_summary_from_the_metrics(start):
    shipped = [{"reward/mean": 0.1 * n, "staleness/max": n, "tokens/unaccounted": 0} for n in range(3)]
    trained = [{"loss": 0.5, "perf/tokens_per_second": 1234.5} for _ in range(3)]
    roles = {
        "orchestrator": REPORT.replace("ROWS", repr(shipped)),
        "trainer": REPORT.replace("ROWS", repr(trained)) + "import time; time.sleep(1)",
    }
    code, output = start(roles).end()
    assert code == 0
    assert "step 3/3 | reward 0.2 | loss 0.5 | staleness 2 | tokens/s 1234" in output
    assert "3 of 3" in output
    assert "0.000 (first 1) -> 0.200 (last 1)" in output
    assert "uv run page " in output


@pytest.mark.extended
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


def runs(start, *keys, exit_seconds=600.0, **roles):
    """Start a server, two runs, and the trainer, which ends after a file says so."""
    trainer = "import os, pathlib, time\nend = pathlib.Path(os.environ['RUN']) / 'end'\nprint('up', flush=True)\n"
    trainer += "while not end.exists(): time.sleep(0.02)"
    return start(
        {"inference": FOREVER, "run_a": FOREVER, "run_b": FOREVER, "trainer": trainer} | roles,
        *keys,
        exit_seconds=exit_seconds,
    )


BAD = IMPORTS + "def main(): raise ConfigError('rank is too large')\nrun_main(main)"


@pytest.mark.extended
def test_rl_failed_run_does_not_end_the_others_and_decides_the_exit_code(start):
    wait = "import os, pathlib, time\nend = pathlib.Path(os.environ['RUN']) / 'end'\n"
    run = runs(start, run_a=BAD, run_b=f"{wait}while not end.exists(): time.sleep(0.02)")
    run.wait_for_log("trainer", "up")
    events = run.output_dir / "events.jsonl"
    until(lambda: '"event": "failed"' in events.read_text(), "the failure of run_a")
    assert run.process.poll() is None
    (run.output_dir / "end").touch()
    code, output = run.end()
    assert code == 2
    assert f"run_a exited with code 2: rank is too large; log {run.output_dir}" in output
    assert output.splitlines()[-1].startswith("error: run_a: rank is too large (log ")


@pytest.mark.extended
def test_rl_all_runs_failed_ends_an_unused_trainer(start):
    run = runs(start, run_a="raise SystemExit(1)", run_b=BAD)
    code, _ = run.end()
    assert code == 2, "the largest of both"


@pytest.mark.extended
def test_rl_all_runs_failed_leaves_the_trainer_to_a_run_that_joined(start, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/in_use").touch()
    run = runs(start, run_a="raise SystemExit(1)", run_b=BAD)
    events = run.output_dir / "events.jsonl"
    until(lambda: events.exists() and events.read_text().count('"event": "failed"') == 2, "the failure of both runs")
    run.wait_for_log("trainer", "up")
    time.sleep(3)  # several checks
    assert run.process.poll() is None
    (run.output_dir / "end").touch()
    code, _ = run.end()
    assert code == 2


@pytest.mark.extended
def test_rl_failed_run_that_joined_another_trainer_ends_rl(start):
    code, output = start({"run_a": BAD}).end()
    assert code == 2
    assert "error: run_a: rank is too large" in output


@pytest.mark.extended
def test_rl_lost_trainer_of_several_runs_ends_all(start):
    run = runs(start, run_a="raise SystemExit(1)", trainer="import time; time.sleep(3); raise SystemExit(3)")
    code, output = run.end()
    assert code == 1
    assert "error: trainer exited with code 3" in output


@pytest.mark.extended
def test_rl_run_of_several_is_restarted_alone(start):
    again = "import sys\nif 'again' not in sys.argv: raise SystemExit(1)\n" + DONE
    run = runs(start, "--max-restarts", "1", run_a=again, run_b=DONE)
    run.wait_for_log("run_a", "done")
    (run.output_dir / "end").touch()
    code, output = run.end()
    assert code == 0 and "run_a exited with code 1; restart 1 of 1" in output


@pytest.mark.extended
def test_rl_run_of_several_that_is_over_is_not_restarted(start):
    fail = "import os, pathlib\n(pathlib.Path(os.environ['RUN']) / 'run_a.over').touch()\nraise SystemExit(1)"
    run = runs(start, "--max-restarts", "1", run_a=fail, run_b=DONE)
    events = run.output_dir / "events.jsonl"
    until(lambda: events.exists() and '"event": "failed"' in events.read_text(), "the failure of run_a")
    (run.output_dir / "end").touch()
    code, output = run.end()
    assert code == 1 and "restart" not in output


@pytest.mark.extended
def test_rl_succeeds_if_its_runs_do_and_one_that_joined_dies(start, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/in_use").touch()
    run = runs(start, run_a=DONE, run_b=DONE)
    for name in ("run_a", "run_b"):
        run.wait_for_log(name, "done")
    time.sleep(2)  # several checks
    assert run.process.poll() is None
    (tmp_path / "out/in_use").unlink()
    (run.output_dir / "end").touch()
    assert run.end()[0] == 0


@pytest.mark.extended
def test_rl_trainer_that_outlives_its_runs_is_the_culprit(start):
    code, output = runs(start, run_a=DONE, run_b=DONE, exit_seconds=1).end()
    assert code == 1
    assert "error: trainer did not exit" in output


@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_rl_signal_stops_all_runs(start, number):
    run = runs(start)
    for name in ("inference", "run_a", "run_b", "trainer"):
        run.wait_for_log(name, "up")
    pids = run.pids()
    os.kill(run.process.pid, number)
    code, _ = run.end()
    assert code == 128 + number
    assert_gone(pids)
