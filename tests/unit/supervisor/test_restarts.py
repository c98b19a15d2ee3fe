"""`max_restarts`: a process that dies, hangs or is stopped is restarted, and its orphans are killed."""

import json
import os
import signal
import time

import psutil
import pytest

from tests.unit.supervisor.test_supervisor import FOREVER, STUBBORN, assert_gone

pytestmark = pytest.mark.extended

UNTIL_DONE = """
import os, pathlib, sys, time
print("up", os.getpid(), *sys.argv[1:], flush=True)
while not (pathlib.Path(os.environ["RUN"]) / "done").exists(): time.sleep(0.02)
"""
WITH_ORPHAN = f"""
import os, subprocess, sys, time
code = {STUBBORN!r}
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print("orphan", child.pid, flush=True)
{FOREVER}
"""


def events(run):
    return [json.loads(line) for line in (run.output_dir / "events.jsonl").read_text().splitlines()]


def happened(run, event, name):
    return [e for e in events(run) if (e["event"], e["name"]) == (event, name)]


def test_rl_each_killed_process_is_restarted_and_the_run_completes(start):
    run = start({"inference": WITH_ORPHAN, "orchestrator": UNTIL_DONE, "trainer": UNTIL_DONE}, "--max-restarts", "2")
    orphan = int(run.wait_for_log("inference", "up").split()[1])
    for victim in ("inference", "orchestrator", "trainer"):
        pid = int(run.wait_for_log(victim, "up").split("up ")[1].split()[0])
        os.kill(pid, signal.SIGKILL)
        log = run.wait_for_log(victim, "restart 1 of 2 ---")
        assert f"up {pid}" in log, "the log of the first is kept"
        if victim == "inference":
            assert not psutil.pid_exists(orphan), "what it left behind is gone before it starts again"
        else:
            run.wait_for_log(victim, "again 1")
        [ended] = happened(run, "ended", victim)
        assert (ended["pid"], ended["code"]) == (pid, -signal.SIGKILL)
    (run.output_dir / "done").touch()
    code, output = run.end()
    assert code == 0, output
    assert "inference was killed by SIGKILL; restart 1 of 2 (pid" in output
    assert [e["event"] for e in events(run)][-1] == "finished"


def test_rl_stopped_descendant_is_killed_and_its_process_restarted(start):
    """The process has no heartbeat, and its parent exits with it."""
    child = "import time; time.sleep(600)"
    parent = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}])
print("up", child.pid, flush=True)
sys.exit(bool(child.wait()))
"""
    roles = {"inference": parent, "orchestrator": UNTIL_DONE, "trainer": UNTIL_DONE}
    run = start(roles, "--max-restarts", "1", "--heartbeat.warn-after-seconds", "2")
    stopped = int(run.wait_for_log("inference", "up").split()[1])
    began = time.time()
    os.kill(stopped, signal.SIGSTOP)
    log = run.wait_for_log("inference", "restart 1 of 1")
    [event] = happened(run, "stopped", f"inference/{stopped}")
    assert event["time"] - began < 30, "reported"
    assert_gone([stopped])
    assert happened(run, "killed", f"inference/{stopped}")
    second = int(run.wait_for_log("inference", "restart 1 of 1 ---\nup").split()[-1])
    assert log
    os.kill(second, signal.SIGSTOP)
    code, output = run.end()
    assert code == 1
    assert f"error: inference exited with code 1: inference/{second} (pid {second}, " in output
    assert "was stopped (SIGSTOP?) for " in output
