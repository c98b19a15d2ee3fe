"""`doctor` on made-up directories, and on one of real processes of which one is stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.doctor import examine
from prime_rl.doctor.collect import read_facts, read_settings
from prime_rl.entrypoints import doctor
from prime_rl.liveness.file_locks import find_lock_holders, hold_run_lock
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.loading.dump import write_config
from prime_rl.storage.paths import RunPaths

PROCESS = """
import sys, time
from pathlib import Path
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.paths import RunPaths
name, waits, root = sys.argv[1:]
heart = HeartbeatWriter(RunPaths(Path(root)), name, name.partition("_")[0], 0.1)
heart.start()
heart.enter("wait", 600.0, waits or None)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(tmp_path / "run [1]")
    write_config(RLConfig.load(["--max-steps", "60", "--ckpt", "--output-dir", str(paths.root)]), paths.run_toml)
    return paths


@pytest.fixture
def quick(monkeypatch):
    """Observe five times as often."""
    monkeypatch.setattr(examine, "_OBSERVE_INTERVAL_SECONDS", 0.2)


def run(capsys, *argv):
    code = doctor._main([str(word) for word in argv])
    return code, capsys.readouterr()


def test_doctor_without_a_run_prints_one_line_and_exits_with_2(tmp_path, capsys):
    for directory in (tmp_path, tmp_path / "none"):
        code, output = run(capsys, directory)
        assert (code, output.out) == (2, "")
        assert output.err == f"error: {directory} contains no run; pass the output_dir of a run\n"


def test_read_facts_reads_metrics_events_and_versions(paths):
    paths.metrics_dir.mkdir()
    paths.metrics("trainer").write_text('{"step": 10, "time/step": 1.5}\n{"step": 11, "time/step": 1.25}\n{"st')
    evaluation = '{"step": 13, "eval/time": 1.0}\n'
    paths.metrics("orchestrator").write_text(f'not json\n{{"step": 12, "reward/mean": 0.5}}\n{evaluation}')
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


def test_lock_owner_is_found_without_taking_the_lock(paths):
    assert find_lock_holders(paths.lock) == []
    with hold_run_lock(paths):
        assert find_lock_holders(paths.lock) == [os.getpid()]
    assert find_lock_holders(paths.lock) == []


def test_doctor_damaged_directory_is_diagnosed(paths, capsys):
    for file in (paths.events, paths.metrics("trainer"), paths.heartbeat("trainer_0"), paths.lock, paths.run_toml):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"\xff\x00[[]\n[]\n")
    paths.error("trainer").parent.mkdir()
    paths.error("trainer").write_text("[]")
    paths.checkpoints_dir.write_text("a file")
    code, output = run(capsys, paths.root)
    assert code == 1 and "not running" in output.out


def test_doctor_escapes_control_characters_of_error_messages(paths, capsys):
    paths.logs_dir.mkdir()
    paths.error("trainer").write_text(json.dumps({"code": 1, "message": "cannot parse \x1b[2J[red]a[/nothing]"}))
    _, output = run(capsys, paths.root)
    assert "cannot parse \\x1b[2J[red]a[/nothing]" in output.out and "run [1]" in output.out
    assert "\x1b" not in output.out


def test_doctor_finished_run_exits_with_0(paths, capsys):
    with HeartbeatWriter(paths, "trainer_0", "trainer"):
        pass
    paths.events.write_text('{"time": 1, "event": "started", "name": "trainer"}\n{"time": 2, "event": "finished"}\n')
    code, output = run(capsys, paths.root)
    assert code == 0
    assert "run [1]: finished" in output.out
    code, output = run(capsys, paths.root, "--json")
    assert (code, json.loads(output.out)["state"]) == (0, "finished")


def test_doctor_stopped_process_is_reported_with_the_chain_of_waits(paths, capsys, quick):
    """Real processes, a real SIGSTOP; then SIGCONT, and a kill without a last heartbeat."""
    waits = {"trainer_0": "orchestrator", "orchestrator": "inference", "inference": ""}
    command = [sys.executable, "-c", PROCESS]
    started = {
        name: subprocess.Popen([*command, name, peer, str(paths.root)], stdout=subprocess.PIPE)
        for name, peer in waits.items()
    }
    try:
        for process in started.values():
            assert process.stdout.readline() == b"ready\n"
        code, output = run(capsys, paths.root)
        assert code == 0, output.out
        inference = started["inference"]
        inference.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, inference.pid, os.WSTOPPED)
        code, output = run(capsys, paths.root, "--json")
        result = json.loads(output.out)
        assert (code, result["culprit"], result["chain"]) == (
            1,
            "inference",
            ["trainer_0", "orchestrator", "inference"],
        )
        assert "is stopped (SIGSTOP?)" in result["problems"][0]["text"]
        code, output = run(capsys, paths.root)
        assert "<- inference is stopped (SIGSTOP?)" in output.out and f"kill -CONT {inference.pid}" in output.out
        inference.send_signal(signal.SIGCONT)
        inference.kill()
        inference.wait()
        code, output = run(capsys, paths.root, "--json")
        result = json.loads(output.out)
        assert (code, result["culprit"]) == (1, "inference")
        assert "its process no longer exists" in result["problems"][0]["text"]
    finally:
        for process in started.values():
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.mark.parametrize("table", ["[[orchestrator.env]]", "[[env]]"])
def test_read_settings_lists_environments_that_run_programs_on_this_machine(tmp_path, table):
    paths = RunPaths(tmp_path)
    shell = 'id = "shell"\nruntime = "subprocess"'
    tables = ['id = "calculator"', shell, f'{shell}\nname = "other"']
    paths.run_toml.write_text("".join(f"{table}\n{lines}\n" for lines in tables))
    assert read_settings(paths).host_environments == ("shell", "other")
