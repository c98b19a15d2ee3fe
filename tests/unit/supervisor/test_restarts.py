"""`max_restarts`: what dies, hangs or is stopped is started again, as often as it may, and nothing of it is left."""

import json
import os
import signal
import time

import psutil
import pytest

from tests.unit.supervisor.test_supervise import FOREVER, STUBBORN, Run, assert_gone

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
from prime_rl.run.heart import Heartbeat
from prime_rl.run.paths import RunPaths
with Heartbeat(RunPaths(pathlib.Path(os.environ["RUN"])), "trainer_0", "trainer", interval_s=0.2) as heart:
    if "again" not in sys.argv:
        heart.enter("step 3", deadline_s=0.5)
        time.sleep(600)
"""


@pytest.fixture
def start(tmp_path):
    runs = []

    def _start(roles, *keys, **kwargs):
        runs.append(Run(tmp_path / "out", roles, keys=keys, **kwargs))
        return runs[-1]

    yield _start
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()


def events(run):
    return [json.loads(line) for line in (run.output_dir / "events.jsonl").read_text().splitlines()]


def happened(run, event, name):
    return [e for e in events(run) if (e["event"], e["name"]) == (event, name)]


def wait_until(holds, what, within=30.0):
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_each_is_started_again_and_the_run_completes(start):
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


def test_restarts_are_used_up(start):
    failing = "import sys; print('up'); raise SystemExit(3)"
    run = start({"orchestrator": failing, "trainer": FOREVER}, "--max-restarts", "2")
    code, output = run.end()
    assert code == 1
    assert len(happened(run, "restarted", "orchestrator")) == 2
    assert "error: orchestrator ended with exit code 3" in output


def test_restarts_of_its_launcher_count(start):
    """The launcher tries again once, as torchrun does, and then fails: of two restarts one is left."""
    script = "import os, pathlib, time; p = pathlib.Path(os.environ['RUN'])\n"
    script += "if (p / 'trainer.attempt_1').exists(): raise SystemExit(1)\n"
    script += "(p / 'trainer.attempt_1').touch(); time.sleep(2.2); raise SystemExit(1)"
    run = start({"orchestrator": FOREVER, "trainer": script}, "--max-restarts", "2")
    code, _ = run.end()
    assert code == 1
    assert [e["detail"] for e in happened(run, "restarted", "trainer")] == [
        "restart 1 of 2, by its launcher",
        "trainer ended with exit code 1; restart 2 of 2",
    ]


@pytest.mark.parametrize("then", ["raise", "time.sleep(600)"])
def test_bad_input_is_not_tried_again(start, then):
    """Also where a launcher that would try again has not given up yet."""
    script = "import time\nfrom prime_rl.errors import *\ndef main(): raise ConfigError('mend this')\n"
    script += f"try: run_main(main)\nexcept SystemExit: {then}"
    run = start({"orchestrator": FOREVER, "trainer": script}, "--max-restarts", "3")
    code, output = run.end()
    assert code == 2
    assert "error: trainer: mend this (log " in output
    assert not happened(run, "restarted", "trainer")


def test_a_stopped_descendant_is_named_killed_and_its_role_started_again(start):
    """SIGSTOP of a process that has no heartbeat; its parent ends with it."""
    child = "import time; time.sleep(600)"
    parent = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}])
print("up", child.pid, flush=True)
sys.exit(bool(child.wait()))
"""
    roles = {"inference": parent, "orchestrator": UNTIL_DONE, "trainer": UNTIL_DONE}
    run = start(roles, "--max-restarts", "1", "--heartbeat.silence", "2")
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
    assert f"error: inference ended with exit code 1: inference/{second} (pid {second}, " in output
    assert "was stopped (SIGSTOP?) for " in output


def test_a_stop_that_ends_in_time_harms_nobody(start):
    run = start({"orchestrator": UNTIL_DONE, "trainer": UNTIL_DONE}, "--heartbeat.silence", "20")
    pid = int(run.wait_for_log("orchestrator", "up").split()[1])
    os.kill(pid, signal.SIGSTOP)
    file = run.output_dir / "events.jsonl"
    wait_until(lambda: '"stopped"' in file.read_text(), "it is not reported")
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: '"resumed"' in file.read_text(), "nor that it goes on")
    (run.output_dir / "done").touch()
    assert run.end()[0] == 0
    assert not happened(run, "killed", "orchestrator")


def test_a_stuck_process_is_started_again(start):
    """It beats, and does nothing for longer than its phase may last."""
    run = start({"orchestrator": "", "trainer": BEATING}, "--max-restarts", "1", "--heartbeat.silence", "1")
    code, output = run.end(within=30)
    assert code == 0, output
    [stuck] = happened(run, "stuck", "trainer_0")
    assert "is stuck: no progress for" in stuck["detail"]
    assert "phase 'step 3'" in stuck["detail"]
    assert "killed: trainer_0 (pid" in output


def test_finished_work_that_is_undone_is_done_again(start):
    """The orchestrator has ended when the trainer goes back."""
    again = "import os, pathlib, sys; p = pathlib.Path(os.environ['RUN'])\n"
    again += "if 'again' in sys.argv: (p / 'undone').unlink(); (p / 'done').touch()"
    run = start({"orchestrator": again, "trainer": UNTIL_DONE})
    run.wait_for_log("trainer", "up")
    (run.output_dir / "undone").touch()
    code, output = run.end()
    assert code == 0, output
    assert "orchestrator is called back" in output
    assert [e["code"] for e in happened(run, "ended", "orchestrator")] == [0, 0]


def test_who_needs_time_to_end_gets_it(start):
    """A scheduler's SIGTERM, and a process that saves before it ends."""
    saving = "import signal, sys, time\ndef save(*_): time.sleep(1.5); print('saved', flush=True); sys.exit()\n"
    saving += "signal.signal(signal.SIGTERM, save); print('up', flush=True); time.sleep(600)"
    run = start({"orchestrator": FOREVER, "trainer": saving}, grace=6.0)
    run.wait_for_log("trainer", "up")
    run.process.send_signal(signal.SIGTERM)
    code, _ = run.end()
    assert code == 128 + signal.SIGTERM
    assert "saved" in (run.output_dir / "logs/trainer.log").read_text()
