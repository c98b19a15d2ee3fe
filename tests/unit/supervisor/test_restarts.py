"""`max_restarts`: a process that dies, hangs or is stopped is restarted, and its orphans are killed."""

import json
import os
import signal
import time

import psutil
import pytest

from tests.support.command import until
from tests.unit.supervisor.test_supervisor import FOREVER, IMPORTS, STUBBORN, assert_gone

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
BEATING = """
import os, pathlib, sys, time
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.paths import RunPaths
with HeartbeatWriter(RunPaths(pathlib.Path(os.environ["RUN"])), "trainer_0", "trainer", interval_seconds=0.2) as heart:
    if "again" not in sys.argv:
        heart.enter("step 3", deadline_seconds=0.5)
        time.sleep(600)
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


def test_rl_without_restarts_left_fails(start):
    failing = "import sys; print('up'); raise SystemExit(3)"
    run = start({"orchestrator": failing, "trainer": FOREVER}, "--max-restarts", "2")
    code, output = run.end()
    assert code == 1
    assert len(happened(run, "restarted", "orchestrator")) == 2
    assert "error: orchestrator exited with code 3" in output


def test_rl_restarts_by_a_launcher_count(start):
    """The launcher retries once, as torchrun does, and then fails: one of two restarts is left."""
    script = "import os, pathlib, time; p = pathlib.Path(os.environ['RUN'])\n"
    script += "if (p / 'trainer.attempt_1').exists(): raise SystemExit(1)\n"
    script += "(p / 'trainer.attempt_1').touch()\n"
    script += "while 'by its launcher' not in (p / 'events.jsonl').read_text(): time.sleep(0.02)\nraise SystemExit(1)"
    run = start({"orchestrator": FOREVER, "trainer": script}, "--max-restarts", "2")
    code, _ = run.end()
    assert code == 1
    assert [e["detail"] for e in happened(run, "restarted", "trainer")] == [
        "restart 1 of 2, by its launcher",
        "trainer exited with code 1; restart 2 of 2",
    ]


@pytest.mark.parametrize("then", ["raise", "time.sleep(600)"])
def test_rl_bad_input_is_not_retried(start, then):
    """Also below a launcher that has not given up yet."""
    script = f"import time\n{IMPORTS}def main(): raise ConfigError('fix this')\n"
    script += f"try: run_main(main)\nexcept SystemExit: {then}"
    run = start({"orchestrator": FOREVER, "trainer": script}, "--max-restarts", "3")
    code, output = run.end()
    assert code == 2
    assert "error: trainer: fix this (log " in output
    assert not happened(run, "restarted", "trainer")


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


def test_rl_short_stop_is_reported_and_kills_nothing(start):
    run = start({"orchestrator": UNTIL_DONE, "trainer": UNTIL_DONE}, "--heartbeat.warn-after-seconds", "20")
    pid = int(run.wait_for_log("orchestrator", "up").split()[1])
    os.kill(pid, signal.SIGSTOP)
    file = run.output_dir / "events.jsonl"
    until(lambda: '"stopped"' in file.read_text(), "the stop is not reported")
    os.kill(pid, signal.SIGCONT)
    until(lambda: '"resumed"' in file.read_text(), "the end of the stop is not reported")
    (run.output_dir / "done").touch()
    assert run.end()[0] == 0
    assert not happened(run, "killed", "orchestrator")


def test_rl_stuck_process_is_restarted(start):
    """It writes heartbeats without progress for longer than the limit of its phase."""
    run = start({"orchestrator": "", "trainer": BEATING}, "--max-restarts", "1", "--heartbeat.warn-after-seconds", "1")
    code, output = run.end()
    assert code == 0, output
    [stuck] = happened(run, "stuck", "trainer_0")
    assert "is stuck: no progress for" in stuck["detail"]
    assert "phase 'step 3'" in stuck["detail"]
    assert "killed: trainer_0 (pid" in output


def test_rl_undone_work_restarts_the_finished_process(start):
    """The orchestrator has exited when the trainer rolls back."""
    again = "import os, pathlib, sys; p = pathlib.Path(os.environ['RUN'])\n"
    again += "if 'again' in sys.argv: (p / 'undone').unlink(); (p / 'done').touch()"
    run = start({"orchestrator": again, "trainer": UNTIL_DONE})
    run.wait_for_log("trainer", "up")
    (run.output_dir / "undone").touch()
    code, output = run.end()
    assert code == 0, output
    assert "orchestrator is restarted: its finished work was undone" in output
    assert [e["code"] for e in happened(run, "ended", "orchestrator")] == [0, 0]


def test_rl_process_that_saves_after_sigterm_can_finish(start):
    """As after the SIGTERM of a cluster scheduler."""
    saving = "import signal, sys, time\ndef save(*_): time.sleep(1.5); print('saved', flush=True); sys.exit()\n"
    saving += "signal.signal(signal.SIGTERM, save); print('up', flush=True); time.sleep(600)"
    run = start({"orchestrator": FOREVER, "trainer": saving}, stop_seconds=600.0)
    run.wait_for_log("trainer", "up")
    run.process.send_signal(signal.SIGTERM)
    code, _ = run.end()
    assert code == 128 + signal.SIGTERM
    assert "saved" in (run.output_dir / "logs/trainer.log").read_text()
