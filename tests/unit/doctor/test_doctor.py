"""`doctor` on directories: made-up ones, and one of real processes of which one is stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from prime_rl.configs import RLConfig
from prime_rl.configs.dump import write_config
from prime_rl.doctor.facts import lock_owner, read_facts
from prime_rl.entrypoints import doctor
from prime_rl.run.heart import Heartbeat
from prime_rl.run.paths import RunPaths
from prime_rl.supervisor.lock import hold_lock

PROCESS = """
import sys, time
from pathlib import Path
from prime_rl.run.heart import Heartbeat
from prime_rl.run.paths import RunPaths
name, waits, root = sys.argv[1:]
heart = Heartbeat(RunPaths(Path(root)), name, name.partition("_")[0], 0.1)
heart.start()
heart.enter("wait", 600.0, waits or None)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(tmp_path / "run [1]")
    write_config(RLConfig.load(["--max-steps", "60", "--ckpt", "--output-dir", str(paths.root)]), paths.run_toml)
    return paths


@pytest.fixture
def quick(monkeypatch):
    """Beats come ten times as often, and are watched for a tenth of the time."""
    monkeypatch.setattr(doctor, "_LOOK_S", 0.2)


def run(capsys, *argv):
    code = doctor._main([str(word) for word in argv])
    return code, capsys.readouterr()


def test_no_run_is_one_line_and_exit_code_2(tmp_path, capsys):
    for directory in (tmp_path, tmp_path / "none"):
        code, said = run(capsys, directory)
        assert (code, said.out) == (2, "")
        assert said.err == f"error: {directory} holds no run; give the output_dir of one\n"


def test_what_is_in_a_directory_is_read(paths):
    paths.metrics_dir.mkdir()
    paths.metrics("trainer").write_text('{"step": 10, "time/step": 1.5}\n{"step": 11, "time/step": 1.25}\n{"st')
    paths.metrics("orchestrator").write_text('not json\n{"step": 12, "policy/version": 11}\n')
    paths.events.write_text('{"time": 1, "event": "started", "name": "trainer", "pid": 5}\n')
    for step in (11, 12):
        paths.weights(step).mkdir(parents=True)
        (paths.weights(step) / "model.safetensors").write_bytes(bytes(1000 * step))
    (paths.checkpoints_dir / "step_30.tmp").mkdir(parents=True)
    paths.logs_dir.mkdir()
    paths.error("trainer").write_text('{"code": 1, "message": "the loss is not finite"}')
    paths.error("inference").write_text("half")
    facts = read_facts(paths, (), time.time(), 0.0)
    assert (facts.trained["step"], facts.shipped["step"], facts.version) == (11, 12, 12)
    assert [event["event"] for event in facts.events] == ["started"]
    assert facts.errors == {"trainer": "the loss is not finite"}
    assert facts.broken.keys() == {"step_30.tmp"}
    assert (facts.settings.max_steps, facts.settings.ckpt, facts.settings.async_level) == (60, "checkpoints", 2)
    assert facts.disk.version == 12000 and facts.disk.used["weights"] == 23000


def test_who_holds_the_directory_is_known_without_asking_for_the_lock(paths):
    assert lock_owner(paths) is None
    with hold_lock(paths):
        assert lock_owner(paths) == os.getpid()
    assert lock_owner(paths) is None


def test_a_damaged_directory_is_no_reason_to_fail(paths, capsys):
    for file in (paths.events, paths.metrics("trainer"), paths.heartbeat("trainer_0"), paths.lock, paths.run_toml):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"\xff\x00[[]\n[]\n")
    paths.error("trainer").parent.mkdir()
    paths.error("trainer").write_text("[]")
    paths.checkpoints_dir.write_text("a file")
    code, said = run(capsys, paths.root)
    assert code == 1 and "not running" in said.out


def test_text_of_others_is_shown_and_not_obeyed(paths, capsys):
    paths.logs_dir.mkdir()
    paths.error("trainer").write_text(json.dumps({"code": 1, "message": "cannot parse \x1b[2J[red]a[/nothing]"}))
    _, said = run(capsys, paths.root)
    assert "cannot parse \\x1b[2J[red]a[/nothing]" in said.out and "run [1]" in said.out
    assert "\x1b" not in said.out


def test_a_finished_run_is_healthy(paths, capsys):
    with Heartbeat(paths, "trainer_0", "trainer"):
        pass
    paths.events.write_text('{"time": 1, "event": "started", "name": "trainer"}\n{"time": 2, "event": "finished"}\n')
    code, said = run(capsys, paths.root)
    assert code == 0
    assert "run [1]: finished" in said.out
    code, said = run(capsys, paths.root, "--json")
    assert (code, json.loads(said.out)["state"]) == (0, "finished")


def test_a_stopped_process_is_named_and_so_is_who_waits_for_it(paths, capsys, quick):
    """Real processes, a real SIGSTOP; then CONT, and a kill that leaves no last word."""
    waits = {"trainer_0": "orchestrator", "orchestrator": "inference", "inference": ""}
    command = [sys.executable, "-c", PROCESS]
    started = {
        name: subprocess.Popen([*command, name, peer, str(paths.root)], stdout=subprocess.PIPE)
        for name, peer in waits.items()
    }
    try:
        for process in started.values():
            assert process.stdout.readline() == b"ready\n"
        code, said = run(capsys, paths.root)
        assert code == 0, said.out
        inference = started["inference"]
        inference.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, inference.pid, os.WSTOPPED)
        code, said = run(capsys, paths.root, "--json")
        told = json.loads(said.out)
        assert (code, told["culprit"], told["chain"]) == (1, "inference", ["trainer_0", "orchestrator", "inference"])
        assert "is stopped (SIGSTOP?)" in told["problems"][0]["text"]
        code, said = run(capsys, paths.root)
        assert "<- inference is stopped (SIGSTOP?)" in said.out and f"kill -CONT {inference.pid}" in said.out
        inference.send_signal(signal.SIGCONT)
        inference.kill()
        inference.wait()
        code, said = run(capsys, paths.root, "--json")
        told = json.loads(said.out)
        assert (code, told["culprit"]) == (1, "inference")
        assert "its process does not exist any more" in told["problems"][0]["text"]
    finally:
        for process in started.values():
            process.kill()
            process.wait()
            process.stdout.close()
