"""A run ends soon, names the culprit, and leaves no process behind (I7); with real processes where signals matter."""

import asyncio
import io
import json
import os
import signal
import time
from collections import Counter

import psutil
import pytest
from rich.console import Console

from prime_rl.core.errors import ConfigError, RunError
from prime_rl.supervisor.child_processes import ProcessSpec
from prime_rl.supervisor.launch import explain, tail
from prime_rl.supervisor.supervisor import Outcome
from tests.support.command import alive, until
from tests.support.virtual_clock import virtual_clock
from tests.unit.supervisor.fake_children import ROLES, RUNS, Scene

FOREVER = "import time, os; print('up', os.getpid(), flush=True); time.sleep(600)"
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
IN_USE, OVER = {"trainer": {"in_use": lambda: True}}, {"run_a": {"is_over": lambda: True}}
JOINED = {"run_a": RUNS["run_a"]}


@pytest.mark.parametrize(
    ("roles", "max_restarts", "fields", "steps", "culprit", "code"),
    [
        (ROLES, 0, {}, [("orchestrator", 0), ("trainer", 0)], None, None),
        (ROLES, 0, {}, [("orchestrator", 3)], "orchestrator", 3),
        (ROLES, 0, {}, [("inference", 0)], "inference", 0),
        (ROLES, 0, {}, [("orchestrator", 1), ("inference", -9)], "inference", -9),
        (ROLES, 0, {}, [("trainer", 0)], "orchestrator", None),
        (ROLES, 2, {}, [("orchestrator", 3)] * 3, "orchestrator", 3),
        (ROLES, 3, {}, [("trainer", 2)], "trainer", 2),
        (RUNS, 0, {}, [("run_a", 2), 60, ("run_b", 0), ("trainer", 0)], "run_a", 2),
        (RUNS, 0, {}, [("run_a", 1), ("run_b", 2)], "run_b", 2),
        (RUNS, 0, IN_USE, [("run_a", 1), ("run_b", 2), 60, ("trainer", 0)], "run_b", 2),
        (RUNS, 0, IN_USE, [("run_a", 0), ("run_b", 0), 60, ("trainer", 0)], None, None),
        (RUNS, 0, {}, [("run_a", 0), ("run_b", 0)], "trainer", None),
        (RUNS, 0, {}, [("run_a", 1), ("trainer", 3)], "trainer", 3),
        (RUNS, 1, {}, [("run_a", 1), ("run_a", 0), ("run_b", 0), ("trainer", 0)], None, None),
        (RUNS, 1, OVER, [("run_a", 1), ("run_b", 0), ("trainer", 0)], "run_a", 1),
        (JOINED, 0, {}, [("run_a", 2)], "run_a", 2),
    ],
    ids=[
        "success", "failure", "server that exits", "effect before its cause", "process that does not exit",
        "no restart left", "bad input", "one of two runs", "both runs", "both runs, another one uses the trainer",
        "another run uses the trainer longer", "trainer that outlives its runs", "run and trainer",
        "run restarted alone", "run that is over", "run that joined another trainer",
    ],
)  # fmt: skip
@virtual_clock
async def test_supervise_exits_in_order_decide_the_outcome(
    monkeypatch, tmp_path, roles, max_restarts, fields, steps, culprit, code
):
    scene, times = Scene(monkeypatch, tmp_path, roles, max_restarts, **fields), Counter()
    for step in steps:
        if isinstance(step, int):
            await asyncio.sleep(step)
            continue
        name, exit_code = step
        assert not scene.outcome.done()
        times[name] += 1
        (await scene.started(name, times[name])).end(exit_code)
        await asyncio.sleep(0.2)
    outcome = await scene.outcome
    assert (outcome.culprit.name if outcome.culprit else None, outcome.code) == (culprit, code)
    assert len(scene.children) == len(roles) + sum(count - 1 for count in times.values())


def test_explain_names_the_error_or_the_end_of_the_log(tmp_path):
    spec = ProcessSpec("trainer", ["x"], {}, tmp_path / "log", tmp_path / "error")
    console = Console(file=io.StringIO(), width=80)
    assert tail(spec.log) == []
    spec.log.write_text("".join(f"line {number}\n" for number in range(100)))
    assert (
        str(explain(Outcome(spec, -9, "is stuck"), console))
        == f"trainer was killed by SIGKILL: is stuck; log {spec.log}"
    )
    assert "line 99" in console.file.getvalue() and "line 10\n" not in console.file.getvalue()
    for code, kind, text in (
        (1, RunError, f"trainer exited with code 1: no luck; log {spec.log}"),
        (2, ConfigError, f"trainer: no luck (log {spec.log})"),
    ):
        spec.error.write_text(json.dumps({"code": code, "message": "no luck"}))
        error = explain(Outcome(spec, code), console)
        assert (type(error), str(error)) == (kind, text)
    late = explain(Outcome(spec, None), console)
    assert str(late) == f"trainer did not exit after the last step; log {spec.log}"


def assert_gone(pids):
    """Check that no process is left, except zombies."""
    until(lambda: not any(is_left(pid) for pid in pids), f"the end of the processes {pids}", timeout_seconds=60)


def is_left(pid):
    try:
        return alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def test_rl_success_prints_steps_and_summary_and_stops_the_server(start):
    until_up = "import os, pathlib, time; log = pathlib.Path(os.environ['RUN']) / 'logs/inference.log'\n"
    until_up += "while not log.read_text().endswith('\\n'): time.sleep(0.02)"
    shipped = [{"reward/mean": 0.1 * n, "staleness/max": n, "tokens/unaccounted": 0} for n in range(3)]
    trained = [{"loss": 0.5, "perf/tokens_per_second": 1234.5} for _ in range(3)]
    roles = {"orchestrator": REPORT.replace("ROWS", repr(shipped)), "trainer": REPORT.replace("ROWS", repr(trained))}
    run = start({"inference": FOREVER} | roles | {"trainer": roles["trainer"] + until_up})
    code, output = run.end()
    assert code == 0
    assert_gone([int((run.output_dir / "logs/inference.log").read_text().split()[1])])
    assert "step 3/3 | reward 0.2 | loss 0.5 | staleness 2 | tokens/s 1234" in output
    assert "3 of 3" in output and "0.000 (first 1) -> 0.200 (last 1)" in output and "uv run page " in output


def start_all(start, **roles):
    """Start three processes; return the run and the process ids when all are up."""
    run = start({"inference": FOREVER, "orchestrator": FOREVER, "trainer": FOREVER} | roles)
    for role in ("inference", "orchestrator", "trainer"):
        run.wait_for_log(role, "up")
    pids = run.pids()
    assert len(pids) == 3
    return run, pids


@pytest.mark.extended
@pytest.mark.parametrize("victim", ["inference", "orchestrator", "trainer"])
def test_rl_killed_process_stops_the_others_and_is_named(start, victim):
    run, pids = start_all(start)
    os.kill(int((run.output_dir / f"logs/{victim}.log").read_text().split()[1]), signal.SIGKILL)
    code, output = run.end()
    assert code == 1
    assert f"error: {victim} was killed by SIGKILL; log {run.output_dir}/logs/{victim}.log" in output
    assert_gone(pids)


def test_rl_bad_input_of_a_process_exits_with_2(start):
    script = "from prime_rl.core.entry_point import run_main\nfrom prime_rl.core.errors import ConfigError\n"
    script += "def main(): raise ConfigError('fix this')\nrun_main(main)"
    code, output = start({"orchestrator": script, "trainer": FOREVER}).end()
    assert code == 2
    assert "error: orchestrator: fix this (log " in output
    assert "Traceback" not in output


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


@pytest.mark.extended
def test_rl_killed_takes_its_children_with_it(start):
    run, pids = start_all(start, inference=STUBBORN)
    run.process.kill()
    assert_gone(pids)
